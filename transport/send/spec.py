"""The values that open a transfer: what to send, and where."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum, StrEnum
from math import inf, isnan

from transport.coding.choice import FormatOf
from transport.wire.sizes import RangeSizes


class Via(StrEnum):
    """How bytes get to a peer."""

    TCP = "tcp"
    SHM = "shm"  # by reference, on one host
    RDMA = "rdma"


class Urgency(IntEnum):
    URGENT = 0
    NORMAL = 1
    BULK = 2  # cache rebalancing: takes what is left


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """One transfer as its sender asks for it: range i is `sizes[i]` bytes, and `address` is "host:port".

    Over Via.SHM the receiver copies the bytes itself; over Via.RDMA (ClientOptions.rdma) they are written into its
    memory, and where that cannot be, go over TCP, counted. `link` names the line to the peer: peers of one link share
    its egress budget (by default every address is a link of its own). After `deadline_s`, seconds from now, the transfer
    has failed; `due_s` only says when it should have arrived, to be sent before what has more time. Tenants of one
    urgency share the link by `weight`. `placement` says where in the receiver's registered memory the ranges belong, as
    (offset, length) pairs. `formats(i)` says what range i is and how it may be made smaller where the receiver decodes
    that; without, and on the same host or over RDMA, bytes travel as they are. `receiver` is the node that the receiver's
    certificate must name, as CLUSTER/NAME; empty: any node's.
    """

    address: str
    transfer_id: str
    secret: bytes = field(repr=False)
    sizes: Sequence[int] | RangeSizes
    _: KW_ONLY
    via: Via = Via.TCP
    link: str = ""
    deadline_s: float = float("inf")
    due_s: float = float("inf")
    urgency: Urgency = Urgency.NORMAL
    tenant: str = ""
    weight: float = 1.0
    placement: Sequence[tuple[int, int]] = ()
    formats: FormatOf | None = None
    receiver: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight < inf:
            raise ValueError(f"weight {self.weight} must be positive and finite")
        if isnan(self.due_s) or isnan(self.deadline_s):
            raise ValueError(f"due_s {self.due_s}, deadline_s {self.deadline_s}: not a time")
