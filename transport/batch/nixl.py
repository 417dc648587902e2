"""NIXL behind the interface of `batch`: for use inside a cluster, over whatever UCX finds there.

Access goes by what an agent publishes (`SegmentRef.handle`): a peer that has it reads and writes what is registered. Local memory
has to be registered, too. Needs the `nixl` extra; UCX is set up by its environment variables.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from transport.batch.engine import Batches, Request, SegmentRef, TaskState, TaskStatus, Write
from transport.batch.registered import Region, Regions, address_of, check_open
from transport.errors import BackendMissing

_ADDRESS_BYTES = 8


class _Task:
    """One request: a transfer of its own."""

    def __init__(self, agent: Any, handle: Any, num_bytes: int) -> None:
        self._agent = agent
        self._handle = handle
        self._num_bytes = num_bytes
        self._ended: TaskStatus | None = None

    def status(self) -> TaskStatus:
        if self._ended is None:
            state = self._agent.check_xfer_state(self._handle)
            if state == "PROC":
                return TaskStatus(TaskState.PENDING, 0)
            self._agent.release_xfer_handle(self._handle)
            done = TaskStatus(TaskState.COMPLETED, self._num_bytes)
            self._ended = done if state == "DONE" else TaskStatus(TaskState.FAILED, 0, f"nixl state {state}")
        return self._ended


class NixlBatch(Batches[_Task]):
    """`backend` is a plugin of NIXL. Raises BackendMissing."""

    def __init__(self, *, backend: str = "UCX") -> None:
        super().__init__()
        try:
            from nixl_cu12._api import nixl_agent, nixl_agent_config
        except ImportError as exc:
            raise BackendMissing("NIXL", "nixl", exc) from exc
        self._name = f"prfaas-{uuid.uuid4().hex}"
        self._agent: Any = nixl_agent(self._name, nixl_agent_config(enable_prog_thread=True, backends=[backend]))
        self._regions = Regions()
        self._peers: dict[bytes, str] = {}  # what they published -> name

    @property
    def address(self) -> str:
        return self._name

    def register_memory(
        self, name: str, memory: memoryview, *, remote_read: bool = False, remote_write: bool = True
    ) -> SegmentRef:
        """Raises ValueError, LocalProtocolError."""
        check_open(name, remote_read=remote_read, remote_write=remote_write, backend="NIXL")
        view = memory.cast("B")
        address = address_of(view)
        with self._lock:
            self._regions.add(name, Region(address, view.nbytes, view))
            try:
                token = self._agent.register_memory([(address, view.nbytes, 0, name)], "DRAM")
            finally:
                self._regions.remove(name)
            self._regions.add(name, Region(address, view.nbytes, view, token))
            published = self._agent.get_agent_metadata()
        return SegmentRef(self._name, name, view.nbytes, b"", address.to_bytes(_ADDRESS_BYTES, "little") + published)

    def unregister_memory(self, name: str) -> None:
        """Idempotent."""
        with self._lock:
            region = self._regions.remove(name)
            if region is not None:
                self._agent.deregister_memory(region.token)

    def submit(self, batch_id: int, requests: Sequence[Request]) -> None:
        """Raises LocalProtocolError, also when local memory is not registered; ValueError."""
        with self._lock:
            batch = self._room(batch_id, requests)
            places = [self._regions.address_of(request.local) for request in requests]
            batch += [self._submit(*each) for each in zip(requests, places, strict=True)]

    def _submit(self, request: Request, local: int) -> _Task:
        handle, size = request.remote.handle, request.local.nbytes
        remote = int.from_bytes(handle[:_ADDRESS_BYTES], "little") + request.offset
        near = self._agent.get_xfer_descs([(local, size, 0)], "DRAM")
        far = self._agent.get_xfer_descs([(remote, size, 0)], "DRAM")
        operation = "WRITE" if isinstance(request, Write) else "READ"
        transfer = self._agent.initialize_xfer(operation, near, far, self._peer(handle[_ADDRESS_BYTES:]))
        self._agent.transfer(transfer)  # whether it began is what its state says
        return _Task(self._agent, transfer, size)

    def _peer(self, published: bytes) -> str:
        if published not in self._peers:
            name = self._agent.add_remote_agent(published)
            self._peers[published] = name.decode() if isinstance(name, bytes) else str(name)
        return self._peers[published]

    def close(self) -> None:
        """Unregisters everything. UCX's own threads end with the process."""
        for name in self._regions.names():
            self.unregister_memory(name)
        with self._lock:
            for peer in set(self._peers.values()):
                self._agent.remove_remote_agent(peer)
            self._peers.clear()
