"""Certificates that count no more: a file of names and serial numbers, read again when it changes.

# one of a line, and comments
spiffe://prfaas/east/prefill/east-p0      this one name
east-p0                                   every holder of that name, in any cluster and role
3f:a0:...                                 a certificate's serial number, hexadecimal, 16 digits or more
"""

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from transport.peers.name import SCHEME, NamelessPeer, PeerCertificate, PeerName

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
SERIAL: Final = re.compile(r"(?:0x)?([0-9A-Fa-f:]{16,})")


@dataclass(frozen=True, slots=True)
class Revoked:
    """What such a file says."""

    names: frozenset[str] = frozenset()
    serials: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError that names the line."""
        names, serials = set(), set()
        for number, line in enumerate(text.splitlines(), start=1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            if entry.startswith(SCHEME):
                try:
                    PeerName.parse(entry)
                except NamelessPeer as exc:
                    raise ValueError(f"line {number}: {exc}") from exc
            if serial := SERIAL.fullmatch(entry):
                serials.add(int(serial[1].replace(":", ""), 16))
            names.add(entry)
        return cls(frozenset(names), frozenset(serials))

    def has(self, peer: PeerCertificate) -> bool:
        """Whether that certificate counts no more."""
        if peer.serial in self.serials:
            return True
        return peer.name is not None and not self.names.isdisjoint({str(peer.name), peer.name.name})


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
            log.error("what was revoked before stays so, and nothing more: %s", exc)
            return self._revoked
