"""What a kind of cluster brings to the agent: which requests it takes, what engines do with what landed, who changes its role."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from node.config import NodeConfig
from node.engine.front import EngineDoor
from node.tasks import Tasks
from node.transfer.incoming import Consumer
from node.transfer.job_replies import Reply
from node.transfer.loans import Producer
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


class LandingClaims(Protocol):
    """Landed KVCache on its way into engines. `jobs` counts claims by kind and outcome, `refused` by reason."""

    refused: Counter[str]
    jobs: Counter[tuple[str, str]]
    loaded_tokens: int

    def claim(self, message: m.ClaimLanding, owner: object, reply: Reply) -> None: ...
    def end(self, message: m.EndJob, owner: object) -> None: ...
    def engine_gone(self, owner: object) -> None: ...


class Convertible(Protocol):
    """What a conversion sees of its node."""

    config: NodeConfig
    tasks: Tasks
    producer: Producer | None
    consumer: Consumer | None

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
    """One kind of cluster. `admit` and `admit_leg` raise NodeRefusal for reservations and prefill legs that it does not take."""

    kind: str
    admit: Admit
    admit_leg: AdmitLeg
    landings: Callable[[Consumer], LandingClaims]
    conversions: Callable[[Convertible, Callable[[], float]], Conversions]
