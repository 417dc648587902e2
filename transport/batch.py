"""Batches of one-sided writes, with the semantics of Mooncake's Transfer Engine (Mooncake §3.2.3, §7.4).

    engine.register_memory(name, buffer) -> SegmentRef       to be handed to whoever may write there
    batch = engine.allocate_batch(size)
    engine.submit(batch, [Write(source, ref, offset), ...])  at most `size` writes over the batch's life
    engine.status(batch, task) -> TaskStatus                 poll; tasks are numbered in order of submission
    engine.free_batch(batch)                                 only when no task is pending

Unlike there, a write needs the segment's secret and stays inside it, is verified before it counts, is resumed when a connection
breaks, and every task has a status of its own.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from transport.client import ClientOptions, Push, TransferClient
from transport.errors import LocalProtocolError
from transport.frames import MAX_LIST
from transport.landings import write_id
from transport.server import ServerOptions, TransferServer


class TaskState(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TaskStatus:
    state: TaskState
    transferred_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """Where registered memory is and what it takes to write there; travels over a channel that is trusted."""

    address: str
    name: str
    num_bytes: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Write:
    """`source` goes to `[offset, offset + len(source))` of a segment; it must hold still until the task has ended."""

    source: memoryview
    target: SegmentRef
    offset: int


@dataclass(frozen=True, slots=True)
class _Task:
    push: Push
    index: int
    num_bytes: int

    def status(self) -> TaskStatus:
        if self.push.landed(self.index):
            return TaskStatus(TaskState.COMPLETED, self.num_bytes)
        result = self.push.wait(0)
        if result is None or result.ok:
            return TaskStatus(TaskState.PENDING, 0)
        return TaskStatus(TaskState.FAILED, 0, result.reason)


@dataclass(slots=True)
class _Batch:
    size: int
    tasks: list[_Task] = field(default_factory=list)


class BatchEngine:
    """Both ends in one object, as in Mooncake: what it registers others may write, and it writes what others registered."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        server_options: ServerOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._server = TransferServer(host, port, options=server_options).start()
        self._client = TransferClient(options=client_options)
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}
        self._ids = count(1)
        self._writes = count()
        self._unique = os.urandom(8).hex()

    @property
    def address(self) -> str:
        return self._server.address

    def register_memory(self, name: str, memory: memoryview) -> SegmentRef:
        secret = os.urandom(32)
        self._server.register_segment(name, memory.cast("B"), secret)
        return SegmentRef(self.address, name, memory.nbytes, secret)

    def unregister_memory(self, name: str) -> None:
        self._server.unregister_segment(name)

    def allocate_batch(self, size: int) -> int:
        with self._lock:
            batch_id = next(self._ids)
            self._batches[batch_id] = _Batch(size)
        return batch_id

    def submit(self, batch_id: int, writes: Sequence[Write]) -> None:
        """Raises LocalProtocolError when the batch is full, ValueError when a write leaves its segment."""
        for write in writes:
            if write.offset < 0 or write.offset + len(write.source) > write.target.num_bytes:
                raise ValueError(f"write at {write.offset} of {len(write.source)} bytes leaves segment {write.target}")
        with self._lock:
            batch = self._batch(batch_id)
            if len(batch.tasks) + len(writes) > batch.size:
                raise LocalProtocolError(f"batch {batch_id} holds {batch.size} tasks at most")
            tasks: dict[int, _Task] = {}
            for target in {write.target for write in writes}:
                numbers = [i for i, write in enumerate(writes) if write.target == target]
                for at in range(0, len(numbers), MAX_LIST):
                    tasks |= self._push(target, writes, numbers[at : at + MAX_LIST])
            batch.tasks += [tasks[i] for i in range(len(writes))]

    def status(self, batch_id: int, task: int) -> TaskStatus:
        with self._lock:
            return self._batch(batch_id).tasks[task].status()

    def batch_status(self, batch_id: int) -> TaskState:
        """FAILED as soon as one task failed, COMPLETED when all are, else PENDING."""
        with self._lock:
            states = {task.status().state for task in self._batch(batch_id).tasks}
        if TaskState.FAILED in states:
            return TaskState.FAILED
        return TaskState.PENDING if TaskState.PENDING in states else TaskState.COMPLETED

    def free_batch(self, batch_id: int) -> None:
        """Raises LocalProtocolError while a task is pending: its source is still being read."""
        with self._lock:
            pending = [t for t in self._batch(batch_id).tasks if t.status().state is TaskState.PENDING]
            if pending:
                raise LocalProtocolError(f"batch {batch_id} has {len(pending)} pending tasks")
            del self._batches[batch_id]

    def close(self) -> None:
        self._client.close()
        self._server.close()

    def __enter__(self) -> "BatchEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _batch(self, batch_id: int) -> _Batch:
        try:
            return self._batches[batch_id]
        except KeyError:
            raise LocalProtocolError(f"no batch {batch_id}") from None

    def _push(self, target: SegmentRef, writes: Sequence[Write], numbers: list[int]) -> dict[int, _Task]:
        sources = [[writes[i].source.cast("B")] for i in numbers]
        push = self._client.open(
            target.address,
            write_id(target.name, f"{self._unique}{next(self._writes)}"),
            target.secret,
            [source[0].nbytes for source in sources],
            sources,
            placement=[(writes[i].offset, source[0].nbytes) for i, source in zip(numbers, sources, strict=True)],
        )
        push.ready_all()
        return {i: _Task(push, at, sources[at][0].nbytes) for at, i in enumerate(numbers)}
