"""Batches of one-sided writes and reads, with the semantics of Mooncake's Transfer Engine (Mooncake §3.2.3, §7.4).

    engine.register_memory(name, buffer) -> SegmentRef       to be handed to peers that may write or read there
    batch = engine.allocate_batch(size)
    engine.submit(batch, [Write(source, ref, offset), Read(target, ref, offset), ...])   at most `size` over its life
    engine.status(batch, task) -> TaskStatus                 poll; tasks are numbered in order of submission
    engine.free_batch(batch)                                 only when no task is pending

Five things differ. Access needs the segment's secret and stays inside the segment. Peers read only what was registered
for reading. Bytes count once they are verified. A broken connection is resumed. Every task has a status of its own.

A read is asked for over a connection to the owner of the memory, which answers with a transfer to the reader's own listener:
flow control, integrity and resumption are those of every transfer. Both ends must be able to reach each other.

    reader                                              owner of the segment
      | Open(read:segment:unique@reader, proof) ------->  |   secret, bounds and the right to read are checked
      |  <------------------------ Accept, or Refuse      |
      |  <== transfer reply:segment:unique =============  |   into a landing that the reader expects
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Final, TypeAlias

from transport.errors import LocalProtocolError, TransportError
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import LandingResult
from transport.receive.registry.landings import WRITE_DEADLINE_S
from transport.receive.registry.segments import ReadRequest, parse_read_id, read_id, reply_secret, write_id
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, Push, PushResult, TransferClient
from transport.send.spec import TransferSpec
from transport.wire.frames import MAX_PLACEMENT

log = logging.getLogger(__name__)

READ_ORPHAN_S: Final = 10.0  # a granted read must begin within this, and may be without a connection for this long


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
    """Where registered memory is and what access takes; travels over a channel that is trusted."""

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

    @property
    def local(self) -> memoryview:
        return self.source

    @property
    def remote(self) -> SegmentRef:
        return self.target


@dataclass(frozen=True, slots=True)
class Read:
    """`[offset, offset + len(target))` of a segment comes into `target`; it is not ours until the task has ended."""

    target: memoryview
    source: SegmentRef
    offset: int

    @property
    def local(self) -> memoryview:
        return self.target

    @property
    def remote(self) -> SegmentRef:
        return self.source


Request: TypeAlias = Write | Read


@dataclass(frozen=True, slots=True)
class _WriteTask:
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
class _Reply:
    """The transfer that brings a read's bytes. `reason` is the owner's, when it refused."""

    result: LandingResult | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _ReadTask:
    """Done when its transfer is: until then the transfer's threads may touch the memory."""

    reply: _Reply
    num_bytes: int

    def status(self) -> TaskStatus:
        result = self.reply.result
        if result is None:
            return TaskStatus(TaskState.PENDING, 0)
        if result.ok:
            return TaskStatus(TaskState.COMPLETED, self.num_bytes)
        return TaskStatus(TaskState.FAILED, 0, self.reply.reason or result.reason)


_Task: TypeAlias = _WriteTask | _ReadTask


class BatchEngine:
    """Both ends in one object, as in Mooncake: peers write or read what it registers, and it does the same at theirs.
    Any thread may use it.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        server_options: ServerOptions | None = None,
        client_options: ClientOptions | None = None,
    ) -> None:
        self._batches: dict[int, tuple[int, list[_Task]]] = {}
        self._ids = count(1)
        self._lock = threading.Lock()  # held while tasks are submitted, too
        self._client = TransferClient(options=client_options)
        self._server = TransferServer(host, port, options=server_options, on_read=self.serve).start()
        self._numbers = count()
        self._unique = os.urandom(8).hex()
        self._served: dict[str, tuple[str, Push]] = {}  # reads of others: reply id -> segment, push
        self._served_lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def serving(self) -> int:
        """Reads of others that are being answered."""
        with self._served_lock:
            return len(self._served)

    @property
    def counters(self) -> Counter[str]:
        """Outcomes of the requests of peers: see `TransferServer.counters`."""
        return self._server.counters

    @property
    def bytes_received(self) -> int:
        """Payload that arrived: bytes that peers wrote, and bytes that we read from them."""
        return self._server.bytes_received

    def register_memory(
        self, name: str, memory: memoryview, *, remote_read: bool = False, remote_write: bool = True
    ) -> SegmentRef:
        """Opens memory to peers that get the result. Raises ValueError."""
        secret = os.urandom(32)
        view = memory.cast("B")
        self._server.register_segment(name, view, secret, readable=remote_read, writable=remote_write)
        return SegmentRef(self.address, name, memory.nbytes, secret)

    def unregister_memory(self, name: str) -> None:
        """Refuses further access and ends what is under way; returns when nothing of ours reads or writes the memory any
        more. Not to be called from a callback.
        """
        self._server.unregister_segment(name)
        with self._served_lock:
            pushes = [push for segment, push in self._served.values() if segment == name]
        for push in pushes:
            push.abort("the segment is no longer registered")
        for push in pushes:
            push.wait()

    def allocate_batch(self, size: int) -> int:
        with self._lock:
            batch_id = next(self._ids)
            self._batches[batch_id] = (size, [])
        return batch_id

    def submit(self, batch_id: int, requests: Sequence[Request]) -> None:
        """Raises LocalProtocolError when the batch is full, ValueError when a request leaves its segment."""
        with self._lock:
            batch = self._room(batch_id, requests)
            tasks: dict[int, _Task] = {}
            for remote, kind in {(request.remote, type(request)): None for request in requests}:
                numbers = [i for i, each in enumerate(requests) if each.remote == remote and type(each) is kind]
                for at in range(0, len(numbers), MAX_PLACEMENT):
                    part = numbers[at : at + MAX_PLACEMENT]
                    views = [requests[i].local.cast("B") for i in part]
                    placement = [(requests[i].offset, len(view)) for i, view in zip(part, views, strict=True)]
                    submitted = self._write if kind is Write else self._read
                    tasks |= dict(zip(part, submitted(remote, views, placement), strict=True))
            batch += [tasks[i] for i in range(len(requests))]

    def status(self, batch_id: int, task: int) -> TaskStatus:
        """Raises LocalProtocolError for an unknown batch."""
        with self._lock:
            return self._batch(batch_id)[1][task].status()

    def batch_status(self, batch_id: int) -> TaskState:
        """FAILED as soon as one task failed, COMPLETED when all are, else PENDING."""
        with self._lock:
            states = {task.status().state for task in self._batch(batch_id)[1]}
        if TaskState.FAILED in states:
            return TaskState.FAILED
        return TaskState.PENDING if TaskState.PENDING in states else TaskState.COMPLETED

    def free_batch(self, batch_id: int) -> None:
        """Raises LocalProtocolError while a task is pending: its memory is still in use."""
        with self._lock:
            pending = [task for task in self._batch(batch_id)[1] if task.status().state is TaskState.PENDING]
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

    def _room(self, batch_id: int, requests: Sequence[Request]) -> list[_Task]:
        """The tasks of a batch that has room for more, and for these. Raises LocalProtocolError, ValueError."""
        for request in requests:
            if request.offset < 0 or request.offset + request.local.nbytes > request.remote.num_bytes:
                what = f"{type(request).__name__.lower()} at {request.offset} of {request.local.nbytes} bytes"
                raise ValueError(f"{what} leaves segment {request.remote}")
            if isinstance(request, Read) and request.target.readonly:
                raise ValueError("a read into memory that is not writable")
        size, tasks = self._batch(batch_id)
        if len(tasks) + len(requests) > size:
            raise LocalProtocolError(f"batch {batch_id} holds {size} tasks at most")
        return tasks

    def _batch(self, batch_id: int) -> tuple[int, list[_Task]]:
        try:
            return self._batches[batch_id]
        except KeyError:
            raise LocalProtocolError(f"no batch {batch_id}") from None

    def _number(self) -> str:
        return f"{self._unique}{next(self._numbers)}"

    def _write(
        self, target: SegmentRef, views: Sequence[memoryview], placement: Sequence[tuple[int, int]]
    ) -> Sequence[_Task]:
        spec = TransferSpec(
            target.address,
            write_id(target.name, self._number()),
            target.secret,
            [len(view) for view in views],
            placement=placement,
        )
        push = self._client.open(spec, [[view] for view in views])
        push.ready_all()
        return [_WriteTask(push, index, len(view)) for index, view in enumerate(views)]

    def _read(
        self, source: SegmentRef, views: Sequence[memoryview], placement: Sequence[tuple[int, int]]
    ) -> Sequence[_Task]:
        asked = read_id(source.name, self._number(), self.address)
        _, reply_id, _ = parse_read_id(asked)
        sizes, reply = [len(view) for view in views], _Reply()
        self._server.expect(
            reply_id,
            reply_secret(source.secret, reply_id),
            sizes,
            [[view] for view in views],
            on_done=lambda result: setattr(reply, "result", result),
            deadline_s=WRITE_DEADLINE_S,
            orphan_timeout_s=READ_ORPHAN_S,
        )
        # No range of it ever becomes ready, because it sends nothing: its only purpose is the owner's Accept.
        spec = TransferSpec(source.address, asked, source.secret, sizes, placement=placement)
        self._client.open(spec, (), on_done=lambda result: self._on_answered(reply_id, reply, result))
        return [_ReadTask(reply, len(view)) for view in views]

    def _on_answered(self, reply_id: str, reply: _Reply, result: PushResult) -> None:
        if result.ok:
            self._server.await_sender(reply_id)
            return
        reply.reason = result.reason
        self._server.cancel(reply_id, f"the read was refused: {result.reason}")

    def serve(self, read: ReadRequest) -> None:
        """Answers a read that the listener granted, if its segment is still the one. The reader's timeout tells it when this
        fails.
        """

        def on_done(result: PushResult) -> None:
            with self._served_lock:
                self._served.pop(read.reply_id, None)
            if not result.ok:
                log.warning("read %s to %s failed: %s", read.reply_id, read.address, result.reason)

        sizes = [len(view) for view in read.views]
        # Held throughout: a caller that unregisters a segment sees all of its reads, and no read comes later.
        with self._served_lock:
            if not self._server.is_registered(read.segment):
                return
            try:
                spec = TransferSpec(read.address, read.reply_id, read.secret, sizes)
                push = self._client.open(spec, [[view] for view in read.views], on_done=on_done)
            except (TransportError, ValueError, OSError) as exc:
                log.warning("read %s to %s cannot be served: %s", read.reply_id, read.address, exc)
                return
            self._served[read.reply_id] = (read.name, push)
        push.ready_all()
