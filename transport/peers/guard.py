"""Asks whether a peer may do something, counts and logs refusals, and ends what is open for a peer that counts no more."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Final

from transport.peers.authorities import Authorities, AuthorityFile
from transport.peers.name import HOW_TO_ISSUE, SHAPE, PeerCertificate, PeerName
from transport.peers.revocation import RevocationList, Revoked
from transport.peers.rights import holders, may

log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 10.0  # a line for each operation and role
LOOK_S: Final = 2.0  # between two looks at the list of revoked peers
LOOK_AT_ENDS_S: Final = 60.0  # between two looks at the ends of certificates
GRACE_S: Final = 3600.0  # after its certificate's end: who renews in time has connected anew by then
REVOKED: Final = "revoked"
EXPIRED: Final = "expired"
PLACE: Final = "place"  # one of a node, and not of the one that is meant
UNLISTED: Final = "unlisted"  # by its authority, which may not sign such a name


def wall_clock_s() -> float:
    """Seconds since 1970."""
    return datetime.now(UTC).timestamp()


class Guard:
    """Of one process, which has the name `own`. May be used from any thread."""

    def __init__(
        self,
        own: PeerName,
        revoked: RevocationList | None = None,
        now: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = wall_clock_s,
        authorities: AuthorityFile | None = None,
    ) -> None:
        self.own = own
        self.told: Callable[[str], None] = lambda reason: None  # of each refusal
        self.followers: list[Callable[[], None]] = []  # called when the list of revoked ones has changed
        self.refused: Counter[tuple[str, str]] = Counter()  # by operation and role
        self._revoked = revoked or RevocationList(None)
        self._authorities = authorities
        self._now = now
        self._followed = self.lists()
        self._unix_s = unix_s
        self._ends_at = now() + LOOK_AT_ENDS_S  # when ends of certificates are next looked at
        self._lock = threading.Lock()
        self._line_at: dict[tuple[str, str], float] = {}
        self._unsaid: Counter[tuple[str, str]] = Counter()
        self._open: dict[object, tuple[PeerCertificate, Callable[[str], None]]] = {}

    def refusal(self, operation: str, peer: PeerCertificate, address: str, place: str = "") -> str:
        """Why that peer may not, in a sentence; "": it may. A refusal is counted, and logged.

        `place` is whom it is taken for, as CLUSTER/NAME: a host's name in a certificate does not say that. "": not known.
        """
        reason, why = self._judged(operation, peer)
        if not why and place and peer.name is not None and peer.name.place != place:
            reason, why = PLACE, f"{peer.name} is not the node {place}"
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
        if self.has_expired(peer):
            return (
                EXPIRED,
                f"the certificate of {peer.name} has expired, and was not replaced within {GRACE_S / 60:.0f} minutes",
            )
        if peer.name.trust != self.own.trust:
            return "trust_domain", f"{peer.name} is of another trust domain than {self.own}"
        if why := self._unlisted(peer):
            return UNLISTED, why
        if not may(peer.name.role, operation):
            return "role", f"{peer.name} may not {operation}: that is for {holders(operation)}"
        return "", ""

    def is_revoked(self, peer: PeerCertificate) -> bool:
        """Whether the list has it."""
        return self._revoked.now(self._now()).has(peer)

    def lists(self) -> tuple[Revoked, Authorities | None]:
        """Whom they name now: what was judged by others is judged again."""
        now = self._now()
        return self._revoked.now(now), self._authorities.now(now) if self._authorities is not None else None

    def _unlisted(self, peer: PeerCertificate) -> str:
        """Why it was not its authority's to sign; "": it was."""
        return self._authorities.now(self._now()).refusal(peer) if self._authorities is not None else ""

    def shut_out(self, peer: PeerCertificate) -> str:
        """Why it counts no more, however long its certificate is good for, as a label and a word; "": it counts."""
        if self.is_revoked(peer):
            return REVOKED
        return UNLISTED if self._unlisted(peer) else ""

    def has_expired(self, peer: PeerCertificate) -> bool:
        """Whether a handshake would have been refused for long."""
        return peer.ends_at + GRACE_S <= self._unix_s()

    @contextmanager
    def opened(self, peer: PeerCertificate, end: Callable[[str], None]) -> Iterator[None]:
        """Something of the peer's is open inside the block; `end_revoked` ends it should the peer count no more meanwhile.

        `end` is told why: REVOKED or EXPIRED.
        """
        ticket = self.enter(peer, end)
        try:
            yield
        finally:
            self.leave(ticket)

    def enter(self, peer: PeerCertificate, end: Callable[[str], None]) -> object:
        """The same without a block; gives what `leave` takes."""
        ticket = object()
        self._open[ticket] = (peer, end)
        return ticket

    def leave(self, ticket: object) -> None:
        self._open.pop(ticket, None)

    def end_revoked(self) -> int:
        """Ends what revoked peers have open, once a list has changed, and peers whose certificate ended long ago.

        Returns how many that were.

        Raises what a follower or an end raises, once all others have been told; the next call then tells all again.
        """
        now = self._now()
        lists = self.lists()
        if lists == self._followed and now < self._ends_at:
            return 0
        held = []
        for ticket, (peer, end) in list(self._open.items()):
            if reason := self._ended_or_unknown(peer):
                held.append((ticket, peer, end, reason))
        with ExitStack() as all_told:  # an error in one keeps none of the others from being told
            for follow in self.followers:
                all_told.callback(follow)
            for ticket, peer, end, reason in held:
                self.leave(ticket)
                self._note(reason, peer, "an open connection", f"{peer} is {reason}")
                self.told(reason)
                all_told.callback(end, reason)
        self._followed, self._ends_at = lists, now + LOOK_AT_ENDS_S
        return len(held)

    def _ended_or_unknown(self, peer: PeerCertificate) -> str:
        """Who cannot be judged has ended, and keeps none of the others from being judged."""
        try:
            return self.ended(peer)
        except Exception:
            log.exception("%s cannot be judged", peer)
            return UNLISTED

    def ended(self, peer: PeerCertificate) -> str:
        """Why what it has open must end, as a label and a word; "": it need not."""
        return self.shut_out(peer) or (EXPIRED if self.has_expired(peer) else "")

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
    """Ends what peers have open that count no more, for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        guard.end_revoked()


def nameless(what: str) -> str:
    """What is said of a certificate of one's own that carries no name."""
    return f"{what}: it must carry a name {SHAPE}; {HOW_TO_ISSUE}"
