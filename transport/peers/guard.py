"""Asks whether a peer may do something, counts and logs refusals, and ends what a revoked peer has open."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from transport.peers.name import HOW_TO_ISSUE, SHAPE, PeerCertificate, PeerName
from transport.peers.revocation import RevocationList
from transport.peers.rights import holders, may

log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 10.0  # a line for each operation and role
LOOK_S: Final = 2.0  # between two looks at the list of revoked peers
REVOKED: Final = "revoked"


class Guard:
    """Of one process, which has the name `own`. May be used from any thread."""

    def __init__(
        self, own: PeerName, revoked: RevocationList | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.own = own
        self.told: Callable[[str], None] = lambda reason: None  # of each refusal
        self.followers: list[Callable[[], None]] = []  # called when the list of revoked ones has changed
        self.refused: Counter[tuple[str, str]] = Counter()  # by operation and role
        self._revoked = revoked or RevocationList(None)
        self._followed = self._revoked.now(now())
        self._now = now
        self._lock = threading.Lock()
        self._line_at: dict[tuple[str, str], float] = {}
        self._unsaid: Counter[tuple[str, str]] = Counter()
        self._open: dict[object, tuple[PeerCertificate, Callable[[], None]]] = {}

    def refusal(self, operation: str, peer: PeerCertificate, address: str) -> str:
        """Why that peer may not, in a sentence; "": it may. A refusal is counted, and logged."""
        reason, why = self._judged(operation, peer)
        if why:
            self._note(operation, peer, address, why)
            self.told(reason)
        return why

    def why_not(self, operation: str, peer: PeerCertificate) -> str:
        """The same, without a trace."""
        return self._judged(operation, peer)[1]

    def _judged(self, operation: str, peer: PeerCertificate) -> tuple[str, str]:
        """A label and a sentence; "" and "": it may."""
        if peer.name is None:
            return "nameless", f"the certificate has no rights: {peer.problem}; {HOW_TO_ISSUE}"
        if self.is_revoked(peer):
            return REVOKED, f"{peer.name} is revoked"
        if peer.name.trust != self.own.trust:
            return "trust_domain", f"{peer.name} is of another trust domain than {self.own}"
        if not may(peer.name.role, operation):
            return "role", f"{peer.name} may not {operation}: that is for {holders(operation)}"
        return "", ""

    def is_revoked(self, peer: PeerCertificate) -> bool:
        """Whether the list has it."""
        return self._revoked.now(self._now()).has(peer)

    @contextmanager
    def opened(self, peer: PeerCertificate, end: Callable[[], None]) -> Iterator[None]:
        """Something of the peer's is open inside the block; `end_revoked` ends it should it be revoked meanwhile."""
        ticket = self.enter(peer, end)
        try:
            yield
        finally:
            self.leave(ticket)

    def enter(self, peer: PeerCertificate, end: Callable[[], None]) -> object:
        """The same without a block; gives what `leave` takes."""
        ticket = object()
        self._open[ticket] = (peer, end)
        return ticket

    def leave(self, ticket: object) -> None:
        self._open.pop(ticket, None)

    def end_revoked(self) -> int:
        """Where the list has changed, ends what revoked peers have open; returns how many that were.

        Raises what a follower or an end raises, once all others have been told; the next call then tells all again.
        """
        revoked = self._revoked.now(self._now())
        if revoked == self._followed:
            return 0
        held = [(ticket, *entry) for ticket, entry in list(self._open.items()) if revoked.has(entry[0])]
        with ExitStack() as all_told:  # an error in one keeps none of the others from being told
            for follow in self.followers:
                all_told.callback(follow)
            for ticket, peer, end in held:
                self.leave(ticket)
                self._note(REVOKED, peer, "an open connection", f"{peer} is revoked")
                self.told(REVOKED)
                all_told.callback(end)
        self._followed = revoked
        return len(held)

    def _note(self, operation: str, peer: PeerCertificate, address: str, why: str) -> None:
        key, now = (operation, peer.role), self._now()
        with self._lock:
            self.refused[key] += 1
            if now < self._line_at.get(key, float("-inf")) + LOG_EVERY_S:
                self._unsaid[key] += 1
                return
            self._line_at[key] = now
            unsaid = self._unsaid.pop(key, 0)
        more = f" ({unsaid} more like it before)" if unsaid else ""
        log.warning("refused %s to %s at %s: %s%s", operation, peer, address, why, more)


async def end_revoked(guard: Guard) -> None:
    """Ends what revoked peers have open, for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        guard.end_revoked()


def nameless(what: str) -> str:
    """What is said of a certificate of one's own that carries no name."""
    return f"{what}: it must carry a name {SHAPE}; {HOW_TO_ISSUE}"
