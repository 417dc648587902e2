"""Reservations for decode: made for gateways, lent to the engine that decodes.

    reserve ──► RESERVED ──all landed──► LANDED ──lend──► lent ──give back──► GONE (blocks are prefix cache)

The node holds the pages (`node/transfer/incoming.py`). While they are lent it ends the reservation only when told to here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hybrid_cache.cache.reservation import Reservation
from node.coding import Coding
from node.errors import NodeRefusal
from node.transfer.incoming import Incoming, IncomingTransfers, LandingState
from transport.control.proto import node_pb2 as pb


class DecodeUse:
    """A reservation that an engine will decode from. `is_reusable`: what landed, and what is computed on it, is exact."""

    def __init__(self, coding: Coding) -> None:
        self._reuses_quantised = coding.reuse_quantised
        self.exact = not coding.accept_quantised
        self.is_reusable = True
        self.is_lent = False
        self.claims = 0  # engines that wait for it

    @property
    def is_awaited(self) -> bool:
        """Whether an engine has it or waits for it."""
        return self.is_lent or self.claims > 0

    def keeps(self, *, lossy: bool) -> bool:
        """Quantised KVCache serves its own request only: others would take it for exact, unless they may."""
        self.is_reusable = not lossy or self._reuses_quantised
        return self.is_reusable


@dataclass(frozen=True, slots=True)
class ReservedDecode:
    """A reservation of the node, and what this package knows of it."""

    entry: Incoming
    use: DecodeUse


class DecodePages:
    """A decode node's reservations, from the gateway's request to the engine's end of its job."""

    def __init__(self, incoming: IncomingTransfers) -> None:
        self._incoming = incoming
        self._beginning = 0  # reservations that are being made

    @property
    def expects_decodes(self) -> bool:
        """Whether there is a reservation for decode, or one is being made."""
        entries = self._incoming.entries.values()
        return bool(self._beginning) or any(isinstance(entry.use, DecodeUse) for entry in entries)

    async def reserve(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """Reserve pages for a decode and expect their bytes. Raises NodeRefusal."""
        self._beginning += 1
        try:
            return await self._incoming.reserve_settled(request, DecodeUse(self._incoming.coding))
        finally:
            self._beginning -= 1

    def find(self, transfer_id: str) -> ReservedDecode:
        """The reservation of that id, however much of it has landed. Raises NodeRefusal."""
        entry = self._incoming.find(transfer_id)
        if not isinstance(entry.use, DecodeUse):
            raise NodeRefusal("unknown_transfer", "it is reserved for a prefix, which no engine loads")
        return ReservedDecode(entry, entry.use)

    @contextmanager
    def claimed(self, reserved: ReservedDecode) -> Iterator[None]:
        """An engine waits for it inside the block: the end of its gateway does not end it."""
        self._incoming.begun(reserved.entry)
        reserved.use.claims += 1
        try:
            yield
        finally:
            reserved.use.claims -= 1

    def lend(self, reserved: ReservedDecode) -> None:
        """Lend the pages to an engine: nothing but `give_back` ends them then. Raises NodeRefusal unless they just landed."""
        entry, use = reserved.entry, reserved.use
        if use.is_lent or entry.state is not LandingState.LANDED:
            state = "loading" if use.is_lent else entry.state.value
            raise NodeRefusal("claimed_twice", f"the reservation is {state}")
        use.is_lent = True

    def give_back(self, reserved: ReservedDecode, reason: str) -> None:
        """The engine has let go of the pages: the reservation is over."""
        reserved.use.is_lent = False
        self._incoming.end(reserved.entry, reason)

    def give_up(self, reserved: ReservedDecode, reason: str) -> None:
        """End a reservation, unless its pages are lent."""
        self._incoming.give_up(reserved.entry, reason)
