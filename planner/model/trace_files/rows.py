"""A row of a file of requests, in any of the shapes that are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from planner.model.reading import LEAST, SECONDS, TOKENS, Range, number, spelled_number
from planner.model.trace_files.categories import category_of
from transport.control.settings import SettingsError, require, shown

# Statuses of requests that a larger system would have served, or served whole; others of 400 and above are the client's errors.
CUT: Final = (429, 499)
MILLISECONDS: Final = Range(0, 1e13, "milliseconds")
BLOCK: Final = Range(1, 1e6, "tokens", is_whole=True)
STATUS: Final = Range(100, 599, is_whole=True)
SHAPES: Final = (
    "Mooncake's (timestamp, input_length, output_length, hash_ids), Qwen's (the same with chat_id), Azure's (TIMESTAMP, "
    "ContextTokens, GeneratedTokens), BurstGPT's (Timestamp, Request tokens, Response tokens), agents' sessions (session, t, "
    "blocks) and a gateway's request log (arrived_s, total)"
)
ID_BITS: Final = 256  # of a block's name, as caches know them
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request."""

    arrived_s: float
    prompt: float
    output: float
    ids: Sequence[int] | None = None
    cached: float | None = None
    is_cut: bool = False  # its whole answer would have had an unknown length
    category: str | None = None


class _MooncakeRow(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: float
    input_length: float
    output_length: float
    hash_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


_MOONCAKE: Final = msgspec.json.Decoder(_MooncakeRow)
MOONCAKE_BLOCK: Final = 512


def quickly_parsed(line: str) -> RequestRow | None:
    """A row of Mooncake's traces in a third of the time. None for any other line, which `parsed` reads or refuses."""
    try:
        row = _MOONCAKE.decode(line)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
    ids = None if row.hash_ids is msgspec.UNSET else row.hash_ids
    for value, most in (
        (row.timestamp, MILLISECONDS.high),
        (row.input_length, TOKENS.high),
        (row.output_length, TOKENS.high),
    ):
        if not (LEAST <= value <= most or value == 0):
            return None
    if ids is not None and not _are_ids(ids):
        return None
    return RequestRow(row.timestamp / 1e3, row.input_length, row.output_length, ids)


def block_size_of(row: Mapping[str, Any]) -> int:
    """Tokens of a block that this row names. Raises SettingsError."""
    if "block_tokens" in row:
        return int(number(row, "block_tokens", BLOCK))
    return 128 if "chat_id" in row else MOONCAKE_BLOCK


def parsed(row: Mapping[str, Any]) -> RequestRow | None:
    """None: a request that is no traffic: it was never read, or was wrong. Raises SettingsError."""
    if "TIMESTAMP" in row:
        prompt, output = (spelled_number(row, key, TOKENS) for key in ("ContextTokens", "GeneratedTokens"))
        return RequestRow(_unix_s(row["TIMESTAMP"]), prompt, output)
    if "Request tokens" in row:
        return _parse_burst(row)
    if "arrived_s" in row:
        return _parse_logged(row)
    if "timestamp" not in row:
        fields = ", ".join(str(key) for key in list(row)[:8]) or "none"
        raise SettingsError(f"fields {fields}: an unknown shape; known are {SHAPES}")
    unit, per_s = (SECONDS, 1.0) if "chat_id" in row else (MILLISECONDS, 1e3)
    arrived_s = number(row, "timestamp", unit) / per_s
    return RequestRow(
        arrived_s, number(row, "input_length", TOKENS), number(row, "output_length", TOKENS), _ids(row),
        category=category_of(row),
    )  # fmt: skip


def _parse_logged(row: Mapping[str, Any]) -> RequestRow | None:
    status = number(row, "status", STATUS) if "status" in row else 200
    total = number(row, "total", TOKENS)
    if not total or (400 <= status < 500 and status not in CUT):
        return None
    return RequestRow(
        number(row, "unix_s" if "unix_s" in row else "arrived_s", SECONDS),
        total,
        number(row, "output_tokens", TOKENS),
        _ids(row),
        number(row, "cached", TOKENS),
        is_cut=status >= 500 or status in CUT,
        category=category_of(row),
    )


def _parse_burst(row: Mapping[str, Any]) -> RequestRow:
    """BurstGPT's: a request without an answer has failed."""
    prompt, output = (spelled_number(row, key, TOKENS) for key in ("Request tokens", "Response tokens"))
    return RequestRow(spelled_number(row, "Timestamp", SECONDS), prompt, output, is_cut=output == 0)


def _ids(row: Mapping[str, Any]) -> Sequence[int] | None:
    if "hash_ids" not in row:
        return None
    ids = row["hash_ids"]
    if not _are_ids(ids):
        require(False, "hash_ids", ids, f"a list of integers, at least 0 and below 2^{ID_BITS}")
    return list(ids)


def _are_ids(ids: Any) -> bool:
    """Without a loop in Python: a trace has tens of millions."""
    if not isinstance(ids, list):
        return False
    return not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 1 << ID_BITS)


def _unix_s(stamp: Any) -> float:
    """A time of Azure's, which is in UTC whether it says so or not."""
    try:
        time = datetime.fromisoformat(stamp.strip())
    except (AttributeError, ValueError) as exc:
        raise SettingsError(f"TIMESTAMP = {shown(stamp)}: must be a time like 2023-11-16 18:17:03.9799600") from exc
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return SECONDS.of("TIMESTAMP", (time - EPOCH).total_seconds())
