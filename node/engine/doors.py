"""Where an engine is reached: by gateways, and from its own machine."""

from collections import Counter
from typing import Protocol

from node.process.ports import ListenPort
from node.process.tls_front import TlsFront
from transport.peers.guard import Guard
from transport.peers.name import of_tls
from transport.peers.rights import ASK_ENGINE
from transport.wire.identity import Identity


class EngineDoor(Protocol):
    """Where the engine is reached: at `url` by gateways, at `engine_url` from its own machine; "" before the first engine."""

    url: str
    engine_url: str
    ended: Counter[str]

    async def start(self, port: ListenPort) -> object: ...

    def open(self, engine_url: str) -> None: ...

    def shut(self) -> None: ...

    async def close(self) -> None: ...


class OpenDoor:
    """Without certificates the engine itself faces the network."""

    def __init__(self) -> None:
        self.url = self.engine_url = ""
        self.ended: Counter[str] = Counter()

    async def start(self, port: ListenPort) -> None:
        """The engine will listen."""

    def open(self, engine_url: str) -> None:
        self.url = self.engine_url = engine_url

    def shut(self) -> None:
        """Nothing listens where the engine was."""

    async def close(self) -> None:
        """The engine's port went with it."""


def door_of(identity: Identity | None, guard: Guard | None) -> EngineDoor:
    """The front of a node with certificates, where `guard` knows which callers may ask; without, the engine's own port."""
    if identity is None or guard is None:
        return OpenDoor()
    rights = guard
    front = TlsFront(identity, lambda shown: rights.refusal(ASK_ENGINE, of_tls(shown), "engine_port"))
    rights.followers.append(front.check_again)
    return front
