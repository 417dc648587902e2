"""What a node asks of its role: to send KVCache to other nodes, and to lend landed KVCache to its engine.

The node defines these protocols and calls them. `prfaas_cluster` and `pd_cluster` implement them and hand the objects over at
start, in a `NodeRole`; the node imports neither.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hybrid_cache.cache.reservation import Reservation
from node.kvcache.pages import ArenaPages
from node.transfer.job_replies import Reply
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb
from transport.path.pacing import Budget
from transport.send.client import TransferClient

Reserve = Callable[[], Awaitable[Reservation]]
Clock = Callable[[], float]
AdmitLeg = Callable[[], None]
"""Raises NodeRefusal while the node takes no prefill for another one."""


class OutgoingLeg(Protocol):
    """The part of a prefill job that leaves. It holds the job's pages: `end` releases them once no lane reads them."""

    @property
    def reservation(self) -> Reservation: ...

    @property
    def bytes_sent(self) -> int: ...

    def layer_done(self, message: m.LayerDone) -> None:
        """Slabs that the engine completed may leave. Raises MessageError."""
        ...

    def state_done(self, message: m.StateDone) -> None:
        """A snapshot that the engine completed may leave. Raises MessageError."""
        ...

    def prefill_done(self, after_s: float, bytes_sent: int) -> None:
        """The engine has computed the prompt, `after_s` after it began, when `bytes_sent` had left."""
        ...

    def outcome(self, reason: str) -> str:
        """How the job ended, if its engine ended it for that reason (empty: all went well)."""
        ...

    def end(self, reason: str) -> None:
        """The engine has ended the job."""
        ...


class OutgoingLegs(Protocol):
    """All transfers that leave a node. `pushed` counts them by outcome."""

    pushed: Counter[str]

    @property
    def sending(self) -> int:
        """Transfers on their way."""
        ...

    @property
    def has_legs(self) -> bool:
        """Whether a prefill for another node is computed, leaves, or waits for pages."""
        ...

    def is_idle(self) -> bool:
        """Whether nothing holds pages or waits for some."""
        ...

    async def begin(self, message: m.BeginPrefill, ticket: m.TicketInfo, reply: Reply, reserve: Reserve) -> OutgoingLeg:
        """Reserve a prefill's pages and open its push to the holder of `ticket`. Raises NodeRefusal."""
        ...

    async def push_prefix(self, hashes: list[bytes], ticket: m.TicketInfo) -> tuple[int, int]:
        """Send a cached prefix; returns tokens and bytes. Raises NodeRefusal, TimeoutError."""
        ...

    def abort(self, transfer_id: str, reason: str) -> bool:
        """Stop the push to a reservation. False for an unknown id."""
        ...


class Egress(Protocol):
    """The sending end of a node's links. `client` is there for the metrics of transport."""

    client: TransferClient

    @property
    def bytes_sent(self) -> int: ...

    def states(self) -> list[pb.Link]: ...
    def own_budgets(self) -> dict[str, float]: ...
    def set_budgets(self, budgets: Mapping[str, Budget]) -> None: ...
    async def probe(self, ticket: m.TicketInfo) -> str: ...
    def close(self) -> None: ...


class LineShares(Protocol):
    """Leases of egress budget. `now` is the clock that they end by, and that of `Load.clock_s`."""

    now: Clock

    def take(self, share: pb.EgressShare) -> None:
        """Keep to a share until it ends. Raises NodeRefusal."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillService:
    """What makes a node prefill for others. `open_legs` is called once, when the node's layout is known."""

    egress: Egress
    shares: LineShares
    open_legs: Callable[[ArenaPages, Clock, AdmitLeg], OutgoingLegs]


class DecodeService(Protocol):
    """Reservations for decode, and their landed KVCache on its way into engines.

    `jobs` counts claims of engines by kind and outcome, `refused` by reason.
    """

    refused: Counter[str]
    jobs: Counter[tuple[str, str]]
    loaded_tokens: int

    @property
    def expects_decodes(self) -> bool:
        """Whether there is a reservation for decode, or one is being made."""
        ...

    async def reserve(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """Pages for a decode; returns the transfer's id, its secret and the pages. Raises NodeRefusal."""
        ...

    def claim(self, message: m.ClaimLanding, owner: object, reply: Reply) -> None: ...
    def end(self, message: m.EndJob, owner: object) -> None: ...
    def engine_gone(self, owner: object) -> None: ...
