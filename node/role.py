"""What a kind of cluster hands its nodes: what they take, how they prefill for others, who decodes, who changes a role."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from node.config import NodeConfig
from node.engine.doors import EngineDoor
from node.tasks import Tasks
from node.transfer.incoming import IncomingTransfers
from node.transfer.reach import PeerReach
from node.transfer.services import DecodeService, OutgoingLegs, PrefillService
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """What a node does now. One that is converting does nothing new in either role."""

    node_id: str
    role: str
    is_converting: bool = False


Admit = Callable[[RoleState, pb.ReserveRequest], None]
AdmitLeg = Callable[[RoleState], None]


class Convertible(Protocol):
    """What a conversion sees of its node."""

    config: NodeConfig
    tasks: Tasks
    legs: OutgoingLegs | None
    decodes: DecodeService | None
    engine_load: m.LoadReport
    door: EngineDoor

    def state(self) -> pb.NodeState: ...
    def publish_description(self) -> None: ...


class Conversions(Protocol):
    """The role that a node holds, and its way to another one. `counts` are conversions by how they ended."""

    counts: Counter[str]

    @property
    def standing(self) -> RoleState: ...

    async def convert(self, request: pb.ConvertRequest) -> pb.Conversion:
        """Takes a command up. Raises NodeRefusal."""
        ...

    def report(self) -> pb.Conversion:
        """The newest command, and how it stands."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRole:
    """One kind of cluster. `admit` and `admit_leg` raise NodeRefusal for reservations and prefill legs that it does not take.

    `prefills` is called when the node starts, `decodes` when its layout is known.
    """

    kind: str
    admit: Admit
    admit_leg: AdmitLeg
    prefills: Callable[[NodeConfig, PeerReach], PrefillService]
    decodes: Callable[[IncomingTransfers], DecodeService]
    conversions: Callable[[Convertible, Callable[[], float]], Conversions]
