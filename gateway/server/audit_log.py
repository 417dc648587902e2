"""Operators' changes and refused attempts: name, action, address, outcome. Lines of JSON in files, and the newest in memory.

Refusals have files and a ring of their own, and of each address at most one line in a while: frequent refusals cannot
push out what was done.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from typing import Final, Literal

import msgspec

from gateway.auth.operator import Operator
from gateway.config.audit import AuditConfig
from gateway.telemetry.line_files import LineFiles
from transport.path.site import site_of

log = logging.getLogger("prfaas.gateway.audit")

KEPT_DONE: Final = 1024
KEPT_REFUSED: Final = 256
REFUSED_SHARE: Final = 8  # of the bound, which part files of refusals have
SAME_SITE_S: Final = 10.0  # between two lines about one address
LINES_PER_S: Final = 1.0  # about all addresses together
BURST_LINES: Final = 20.0
MAX_SITES: Final = 1024
MAX_TARGET_CHARS: Final = 512

Outcome = Literal["done", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class Deed:
    """An action, and what it is done to."""

    action: str
    target: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `count` is of refusals of this address since the line before, this one included.

    `issuer` is of the token that names the operator; "": a key does.
    """

    seq: int
    unix_s: float
    operator: str
    role: str
    action: str
    target: str
    address: str
    outcome: Outcome
    status: int
    code: str = ""
    count: int = 1
    issuer: str = ""


class AuditLog:
    """Keeps entries; `clock` paces lines about refusals, `unix_s` dates them."""

    def __init__(
        self,
        config: AuditConfig,
        next_seq: Callable[[], int],
        clock: Callable[[], float],
        unix_s: Callable[[], float],
        on_lost: Callable[[str, int], None],
    ) -> None:
        """Raises OSError where files cannot be made."""
        self.limit = KEPT_DONE + KEPT_REFUSED
        self._next_seq = next_seq
        self._clock = clock
        self._unix_s = unix_s
        self._on_lost = on_lost
        self._done: deque[AuditEntry] = deque(maxlen=KEPT_DONE)
        self._refused: deque[AuditEntry] = deque(maxlen=KEPT_REFUSED)
        self._pace = _Pace(clock)
        self._files: dict[str, LineFiles[AuditEntry]] = {}
        if config.directory is not None:
            refused_bytes = config.max_bytes // REFUSED_SHARE
            for prefix, max_bytes in (("audit", config.max_bytes - refused_bytes), ("refused", refused_bytes)):
                self._files[prefix] = LineFiles(config.directory, prefix, max_bytes, _line_of, on_lost)

    def since(self, seq: int) -> Iterator[AuditEntry]:
        """Entries after `seq`, oldest first."""
        entries = merge(self._done, self._refused, key=lambda entry: entry.seq)
        return (entry for entry in entries if entry.seq > seq)

    def done(self, operator: Operator, deed: Deed, address: str, status: int, code: str = "") -> None:
        """An operator has made a change that its role allows, or has failed to."""
        outcome: Outcome = "failed" if status >= 400 else "done"
        entry = self._entry(operator, deed, address, outcome, status, code, 1)
        self._keep(self._done, "audit", entry)
        log.info(
            "%s: %s %s by %s from %s",
            outcome,
            deed.action,
            entry.target,
            str(operator) or "anybody",
            printable(address) or "?",
        )

    def refused(self, operator: Operator | None, deed: Deed, address: str, status: int, code: str) -> None:
        """A change or a page was refused: to an operator whose role is too small, or to a stranger (None)."""
        count = self._pace.lines_for(address)
        if not count:
            return
        entry = self._entry(operator, deed, address, "refused", status, code, count)
        self._keep(self._refused, "refused", entry)
        log.warning(
            "refused: %s %s by %s from %s (%s), %d times",
            deed.action, entry.target, operator or "a stranger", printable(address) or "?", code, count,
        )  # fmt: skip

    def close(self) -> None:
        """Writes what waits, for as long as a stop may take."""
        for files in self._files.values():
            files.close()

    def _entry(
        self,
        operator: Operator | None,
        deed: Deed,
        address: str,
        outcome: Outcome,
        status: int,
        code: str,
        count: int,
    ) -> AuditEntry:
        return AuditEntry(
            seq=self._next_seq(),
            unix_s=round(self._unix_s(), 3),
            operator=operator.name if operator is not None else "",
            role=operator.role if operator is not None else "",
            action=deed.action,
            target=printable(deed.target[:MAX_TARGET_CHARS]),
            address=address,
            outcome=outcome,
            status=status,
            code=code,
            count=count,
            issuer=operator.issuer if operator is not None else "",
        )

    def _keep(self, ring: deque[AuditEntry], prefix: str, entry: AuditEntry) -> None:
        ring.append(entry)
        if (files := self._files.get(prefix)) is not None:
            files.put(entry)


class _Pace:
    """Which refusals get a line: one of an address in a while, and of all addresses together so many a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sites: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when the last line was, how many since
        self._lines = BURST_LINES
        self._looked_at = clock()

    def lines_for(self, address: str) -> int:
        """How many refusals a line now stands for; 0: no line now."""
        now, site = self._clock(), site_of(address)
        said_at, silent = self._sites.pop(site, (float("-inf"), 0))
        self._lines = min(BURST_LINES, self._lines + (now - self._looked_at) * LINES_PER_S)
        self._looked_at = now
        may = now - said_at >= SAME_SITE_S and self._lines >= 1.0
        self._sites[site] = (now, 0) if may else (said_at, silent + 1)
        if len(self._sites) > MAX_SITES:
            self._sites.popitem(last=False)
        if not may:
            return 0
        self._lines -= 1.0
        return silent + 1


def printable(text: str) -> str:
    """`text` on one line: what is not printable is escaped, as in Python."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _line_of(entry: AuditEntry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
