"""Usage as it lies in the registry: JSON, deflated, within bounds, and believed only where every number can be."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.counts import MOST, Counts, accounts_of, counts_of, of_the_largest
from gateway.telemetry.tenant_usage import TenantUsage

MAX_BYTES: Final = 1 << 20  # etcd takes 1.5 MiB
MAX_TEXT_BYTES: Final = 16 << 20  # inflated
MAX_NAME_CHARS: Final = 128
MOST_FOLDED: Final = 1024  # runs by name, so that one that comes back knows; the oldest are forgotten
LEVEL: Final = 1  # the fastest
FEWER: Final = 3 / 4  # tenants, as often as there are too many

_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
_Number = Annotated[int, Meta(ge=0, le=MOST)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """What one run of a gateway has counted, as it wrote that for the time `number`."""

    gateway: str
    since_unix_s: int
    number: int
    counts: Counts
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedUsage:
    """The sum of `folds` runs that have ended. `folded` has the latest of them, and which of their writes was the last."""

    since_unix_s: int
    folds: int = 0
    folded: Mapping[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=dict)


class RunDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run."""

    gateway: _Name
    since_unix_s: _Number
    number: _Number
    accounts: list[TenantUsage]
    has_ended: bool = False


class FoldedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Of all that have ended."""

    since_unix_s: _Number
    folds: _Number
    folded: Annotated[dict[_Name, _Number], Meta(max_length=MOST_FOLDED)]
    accounts: list[TenantUsage]


def run_written(run: RunUsage) -> bytes:
    """A run for the registry. Raises FleetFailed."""
    document = RunDocument(
        gateway=run.gateway,
        since_unix_s=run.since_unix_s,
        number=run.number,
        accounts=accounts_of(run.counts),
        has_ended=run.has_ended,
    )
    text = msgspec.json.encode(document)
    data = _deflated(text)
    for size, most in ((len(data), MAX_BYTES), (len(text), MAX_TEXT_BYTES)):
        if size > most:
            raise FleetFailed("too_long", f"what tenants have used here takes {size} bytes, more than {most}")
    return data


def run_read(name: str, data: bytes) -> RunUsage:
    """Raises FleetFailed."""
    document = _inflated(f"what run {name[:MAX_NAME_CHARS]} of a gateway has counted", data, RunDocument)
    return RunUsage(
        gateway=document.gateway,
        since_unix_s=document.since_unix_s,
        number=document.number,
        counts=_counts(name, document.accounts),
        has_ended=document.has_ended,
    )


def folded_written(usage: FoldedUsage) -> tuple[bytes, bool]:
    """The sum for the registry, and whether each tenant has its own: beyond the bound, the smallest are one."""
    counts, tenants = usage.counts, len({series[0] for series in usage.counts})
    is_whole = True
    while True:
        text = msgspec.json.encode(_folded_document(usage, counts))
        data = _deflated(text)
        if tenants <= 1 or (len(data) <= MAX_BYTES and len(text) <= MAX_TEXT_BYTES):
            return data, is_whole
        tenants, is_whole = int(tenants * FEWER), False
        counts = of_the_largest(usage.counts, tenants)


def folded_read(data: bytes) -> FoldedUsage:
    """Raises FleetFailed."""
    document = _inflated("what gateways that have ended have counted", data, FoldedDocument)
    counts = _counts("folded", document.accounts)
    return FoldedUsage(since_unix_s=document.since_unix_s, folds=document.folds, folded=document.folded, counts=counts)


def _folded_document(usage: FoldedUsage, counts: Counts) -> FoldedDocument:
    return FoldedDocument(
        since_unix_s=usage.since_unix_s,
        folds=usage.folds,
        folded=dict(usage.folded),
        accounts=accounts_of(counts),
    )


def _counts(name: str, accounts: list[TenantUsage]) -> Counts:
    counts = counts_of(accounts)
    if any(not 0 <= count <= MOST for count in counts.values()):
        raise FleetFailed("malformed", f"usage of {name[:MAX_NAME_CHARS]}: a count is below 0, or too large")
    return counts


def _deflated(text: bytes) -> bytes:
    return zlib.compress(text, LEVEL)


def _inflated(what: str, data: bytes, kind: type[T]) -> T:
    if len(data) > MAX_BYTES:
        raise FleetFailed("malformed", f"{what} is longer than {MAX_BYTES} bytes")
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, MAX_TEXT_BYTES)
        if not inflating.eof:
            raise FleetFailed("malformed", f"{what} is cut off, or longer than {MAX_TEXT_BYTES} bytes")
        return msgspec.json.decode(text, type=kind)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FleetFailed("malformed", f"{what}: {error}") from error
