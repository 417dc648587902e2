"""What a kind of cluster brings to the agent: which reservations it takes, and what its engines may do with what landed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from node.answers import Reply
from node.config import NodeConfig
from node.consumer import Consumer
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb

Admit = Callable[[NodeConfig, pb.ReserveRequest], None]


class Landings(Protocol):
    """Landed KVCache on its way into engines. `jobs` counts claims by kind and outcome, `refused` by reason."""

    refused: Counter[str]
    jobs: Counter[tuple[str, str]]
    loaded_tokens: int

    def claim(self, message: m.ClaimLanding, owner: object, reply: Reply) -> None: ...
    def end(self, message: m.EndJob, owner: object) -> None: ...
    def engine_gone(self, owner: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of cluster. `admit` raises NodeRefusal for reservations that it does not take."""

    kind: str
    admit: Admit
    landings: Callable[[Consumer], Landings]
