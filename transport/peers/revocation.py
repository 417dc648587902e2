"""Certificates that count no more: a file of names and serial numbers, read again when it changes.

# one of a line, and comments
spiffe://prfaas/east/prefill/east-p0      this one name
east-p0                                   every holder of that name, in any cluster and role
serial=3FA0...                            a certificate's serial number, as `openssl x509 -serial` prints it
3f:a0:... or 0x3fa0                       the same; without ':', '0x' or 'serial=', 16 digits or more
16288                                     digits alone: a name, and a number in hexadecimal and in decimal
"""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from transport.peers.name import SCHEME, SEGMENT, SHAPE, NamelessPeer, PeerCertificate, PeerName

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
MAX_SHOWN: Final = 100  # of a line that is refused
HEX: Final = re.compile(r"(?:serial=)?(?:0x)?((?:[0-9a-f]+:)*[0-9a-f]+)", re.IGNORECASE)
BARE: Final = re.compile(r"[0-9A-Fa-f]{,15}")  # these may be names
DECIMAL: Final = re.compile(r"[0-9]{1,49}")  # of the 20 bytes that a serial number has at most


@dataclass(frozen=True, slots=True)
class Revoked:
    """What such a file says."""

    names: frozenset[str] = frozenset()
    serials: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError that names the line."""
        names, serials = set[str](), set[int]()
        for number, line in enumerate(text.splitlines(), start=1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            found = _serials(entry)
            try:
                names |= _names(entry, is_serial=bool(found))
            except NamelessPeer as exc:
                raise ValueError(f"line {number}: {exc}") from exc
            serials |= found
        return cls(frozenset(names), frozenset(serials))

    def has(self, peer: PeerCertificate) -> bool:
        """Whether that certificate counts no more."""
        if peer.serial in self.serials:
            return True
        return peer.name is not None and not self.names.isdisjoint({str(peer.name), peer.name.name})


def _serials(entry: str) -> set[int]:
    """Every number that a line may mean: one too many is seen, one that is missed is not."""
    found = {int(entry)} if DECIMAL.fullmatch(entry) else set[int]()
    written = HEX.fullmatch(entry)
    if written and (found or not BARE.fullmatch(entry)):
        found.add(int(written[1].replace(":", ""), 16))
    return found


def _names(entry: str, *, is_serial: bool) -> set[str]:
    """The name on a line, which may be a number's as well. Raises NamelessPeer where it is neither."""
    if entry.startswith(SCHEME):
        return {str(PeerName.parse(entry))}
    if SEGMENT.fullmatch(entry) and entry not in (".", ".."):
        return {entry}
    if is_serial:
        return set()
    raise NamelessPeer(
        f"{entry[:MAX_SHOWN]!r} is neither {SHAPE}, nor a name of letters, digits, '.', '_' and '-', nor a serial number"
    )


NONE: Final = Revoked()


class RevocationList:
    """One such file. While it cannot be read, what it said before holds."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._version: tuple[int, int, int] | None = None
        self._looked_at = float("-inf")
        self._revoked = NONE

    def load(self) -> Revoked:
        """Reads it now. Raises OSError, ValueError."""
        if self.path is None:
            return NONE
        try:
            stat = os.stat(self.path)
            version = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if version != self._version:
                self._revoked = Revoked.parse(self.path.read_text())
                self._version = version
        except ValueError as exc:
            raise ValueError(f"revoked {self.path}: {exc}") from exc
        return self._revoked

    def now(self, now: float) -> Revoked:
        """What it says; looks at the file at most once in LOOK_EVERY_S."""
        if self.path is None or now < self._looked_at + LOOK_EVERY_S:
            return self._revoked
        self._looked_at = now
        try:
            return self.load()
        except (OSError, ValueError) as exc:
            log.error("earlier revocations stay, new ones are not read: %s", exc)
            return self._revoked
