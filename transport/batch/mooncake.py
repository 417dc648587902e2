"""Mooncake's Transfer Engine behind the interface of `batch`: for use inside a cluster, where its RDMA is.

It has no secrets, no access rights and no checksums: every peer that reaches its port reads and writes what is
registered. Local memory has to be registered, too. Needs the `mooncake` extra.
"""

from collections.abc import Sequence
from typing import Any

from transport.batch.engine import Batches, Request, SegmentRef, TaskState, TaskStatus, Write
from transport.batch.registered import Region, Regions, address_of, check_open
from transport.errors import BackendMissing, TransportError
from transport.path.tcp import format_address


class _Task:
    """One request in a batch of its own: the engine tells of a batch only how its first task is."""

    def __init__(self, engine: Any, number: int, num_bytes: int) -> None:
        self._engine = engine
        self._number = number
        self._num_bytes = num_bytes
        self._ended: TaskStatus | None = None
        if number <= 0:
            self._ended = TaskStatus(TaskState.FAILED, 0, "not_submitted")

    def status(self) -> TaskStatus:
        if self._ended is None:
            # Once it is not running any more the engine forgets it: it must not be asked again.
            state = self._engine.transfer_check_status(self._number)
            if state == 0:
                return TaskStatus(TaskState.PENDING, 0)
            failed = TaskStatus(TaskState.FAILED, 0, f"mooncake status {state}")
            self._ended = failed if state < 0 else TaskStatus(TaskState.COMPLETED, self._num_bytes)
        return self._ended


class MooncakeBatch(Batches[_Task]):
    """`protocol` is "tcp" or "rdma", `device` a list of NICs as Mooncake takes it. Raises BackendMissing, TransportError."""

    def __init__(self, host: str = "127.0.0.1", *, protocol: str = "tcp", device: str = "") -> None:
        super().__init__()
        try:
            from mooncake.engine import TransferEngine
        except ImportError as exc:
            raise BackendMissing("Mooncake's Transfer Engine", "mooncake", exc) from exc
        self._engine: Any = TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise TransportError(f"Mooncake's Transfer Engine did not start on {host} over {protocol}: {code}")
        self._address = format_address(host, self._engine.get_rpc_port())
        self._regions = Regions()

    @property
    def address(self) -> str:
        return self._address

    def register_memory(
        self, name: str, memory: memoryview, *, remote_read: bool = False, remote_write: bool = True
    ) -> SegmentRef:
        """Raises ValueError, LocalProtocolError, TransportError."""
        check_open(name, remote_read=remote_read, remote_write=remote_write, backend="Mooncake's Transfer Engine")
        view = memory.cast("B")
        region = Region(address_of(view), view.nbytes, view)
        with self._lock:
            self._regions.add(name, region)
            if code := self._engine.register_memory(region.address, region.num_bytes):
                self._regions.remove(name)
                raise TransportError(f"Mooncake's Transfer Engine did not register {name!r}: {code}")
        return SegmentRef(self._address, name, view.nbytes, b"", region.address.to_bytes(8, "little"))

    def unregister_memory(self, name: str) -> None:
        """Idempotent."""
        with self._lock:
            region = self._regions.remove(name)
            if region is not None:
                self._engine.unregister_memory(region.address)

    def submit(self, batch_id: int, requests: Sequence[Request]) -> None:
        """Raises LocalProtocolError, also when local memory is not registered; ValueError."""
        with self._lock:
            batch = self._room(batch_id, requests)
            places = [self._regions.address_of(request.local) for request in requests]
            batch += [self._submit(*each) for each in zip(requests, places, strict=True)]

    def _submit(self, request: Request, local: int) -> _Task:
        start = (
            self._engine.batch_transfer_async_write
            if isinstance(request, Write)
            else self._engine.batch_transfer_async_read
        )
        size = request.local.nbytes
        remote = int.from_bytes(request.remote.handle, "little") + request.offset
        return _Task(self._engine, start(request.remote.address, [local], [remote], [size]), size)

    def close(self) -> None:
        """Unregisters everything. The engine's own threads end with the process."""
        for name in self._regions.names():
            self.unregister_memory(name)
