"""Requests over time: traces read from files, and arrivals made up from a distribution.

Formats, told apart by their fields; files may be plain, or compressed by gzip, xz or zstd:

    Mooncake jsonl   timestamp (ms), input_length, output_length, hash_ids (512 tokens per block)
    Qwen-like jsonl  the same with chat_id; timestamp in SECONDS, 128 tokens per block
    Azure csv        TIMESTAMP (UTC), ContextTokens, GeneratedTokens
    Azure jsonl      timestamp (ms), input_length, output_length
    our request log  unix_s, total, output_tokens, cached, block_tokens, hash_ids, status (a folder of files, or one of them);
                     without blocks: what GET /prfaas/requests of a gateway gives
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from planner.errors import InputError
from planner.model.profile import Floats
from planner.model.reading import (
    RATE,
    SECONDS,
    TOKENS,
    Range,
    json_rows,
    named,
    number,
    open_text,
    placed,
    spelled_number,
)
from planner.model.traffic import Lengths
from transport.control.settings import SettingsError, require, shown

TICK_S: Final = 3.0  # Mooncake's public traces know time in steps of three seconds
TICK_JITTER_S: Final = 0.01  # some ticks are a millisecond early
LOG_FILES: Final = "requests-*.jsonl"  # of a gateway's request log (`gateway/telemetry/request_log.py`)
# Statuses of requests that a larger system would have served, or served whole; others of 400 and above are the client's errors.
CUT: Final = (429, 499)
MAX_SPAN_S: Final = 366 * 86_400.0  # of a trace, and of what is simulated: results are counted by the second
MILLISECONDS: Final = Range(0, 1e13, "milliseconds")
BLOCK: Final = Range(1, 1e6, "tokens", is_whole=True)
STATUS: Final = Range(100, 599, is_whole=True)
MANY: Final = 100  # requests, whose rate says something of their clock
MAX_RATE: Final = 1_000.0  # requests per second of a trace in milliseconds
SHAPES: Final = (
    "Mooncake's (timestamp, input_length, output_length, hash_ids), Qwen's (the same with chat_id), Azure's (TIMESTAMP, "
    "ContextTokens, GeneratedTokens), agents' sessions (session, t, blocks) and a gateway's request log (arrived_s, total)"
)
ID_BITS: Final = 256  # of a block's name, as caches know them
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Placed: TypeAlias = tuple[str, Mapping[str, Any]]  # a row, and where it is in its file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests sorted by arrival. `blocks[i]` are the ids of request i's full and partial blocks, None without a cache."""

    name: str
    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    blocks: tuple[tuple[int, ...], ...] | None = None
    block_size: int = 512
    cached_tokens: Floats | None = None  # what the system that wrote the trace found cached

    def __post_init__(self) -> None:
        if not self.span_s <= MAX_SPAN_S:
            raise InputError(f"requests come over {self.span_s:g} s; at most {MAX_SPAN_S:g} s are simulated")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def faster(self, factor: float) -> "Trace":
        """The same requests at `factor` times the rate."""
        if not 0 < factor < float("inf"):
            raise InputError(f"rate_scale={factor}: must be above 0")
        return replace(self, arrival_s=self.arrival_s / factor)

    def head(self, count: int) -> "Trace":
        """The first `count` requests."""
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            blocks=self.blocks[:count] if self.blocks is not None else None,
            cached_tokens=self.cached_tokens[:count] if self.cached_tokens is not None else None,
        )

    def spread(self, rng: np.random.Generator) -> "Trace":
        """Arrivals spread over their ticks, if the trace has ticks: else tail latencies are an artefact of the clock."""
        times = np.round(self.arrival_s / TICK_S) * TICK_S
        if len(times) < 10 or np.abs(self.arrival_s - times).max() > TICK_JITTER_S:
            return self
        spread = times + rng.random(len(times)) * TICK_S
        # Within a tick the order of the file is kept: turns of a conversation must not overtake each other.
        ends = np.flatnonzero(np.append(np.diff(times) > 0, True)) + 1
        starts = np.append(0, ends[:-1])
        for start, end in zip(starts, ends, strict=True):
            spread[start:end].sort()
        return replace(self, arrival_s=spread)


def read_trace(path: Path) -> Trace:
    """Reads any of the formats above. Raises InputError naming the file, the row, the field and its value."""
    with named(f"trace {path}"):
        if path.is_dir():
            return _to_trace(path, _rows_of_log(path))
        return _to_trace(path, _rows_of(path))


def _rows_of_log(directory: Path) -> Iterator[_Placed]:
    """All files of a gateway's request log: its workers each have their own, and begin a new one now and then."""
    paths = sorted(directory.glob(LOG_FILES))
    if not paths:
        raise SettingsError(f"no files called {LOG_FILES} in it")
    for path in paths:
        with placed(path.name):
            rows = list(_rows_of(path))
        for place, row in rows:
            yield f"{path.name}, {place}", row


def _rows_of(path: Path) -> Iterator[_Placed]:
    with open_text(path) as text:
        if ".csv" not in [suffix.lower() for suffix in path.suffixes]:
            for number, row in json_rows(text, is_growing=path.match(LOG_FILES)):
                yield f"row {number}", row
            return
        try:
            for number, row in enumerate(csv.DictReader(text), 1):
                yield f"row {number}", row
        except csv.Error as exc:
            raise SettingsError(f"not CSV: {exc}") from exc


@dataclass(frozen=True, slots=True)
class _Row:
    arrived_s: float
    prompt: float
    output: float
    ids: tuple[int, ...] | None = None
    cached: float | None = None
    is_cut: bool = False  # its whole answer would have had an unknown length


def _to_trace(path: Path, rows: Iterable[_Placed]) -> Trace:
    parsed: list[tuple[_Row, str]] = []
    in_ms = False
    block_size: float | None = None
    for place, row in rows:
        try:
            size = number(row, "block_tokens", BLOCK) if "block_tokens" in row else 128 if "chat_id" in row else 512
            if block_size not in (None, size):
                raise SettingsError(f"blocks of {size:g} tokens, of {block_size:g} before")
            block_size = size
            in_ms = in_ms or ("timestamp" in row and "chat_id" not in row)
            if (each := _parse(row)) is not None:
                parsed.append((each, place))
        except SettingsError as exc:
            raise SettingsError(f"{place}: {exc}") from exc
    if not parsed:
        raise SettingsError("empty; at least one request is needed")
    parsed.sort(key=lambda each: each[0].arrived_s)
    (first, earliest), (last, latest) = parsed[0], parsed[-1]
    if last.arrived_s - first.arrived_s > MAX_SPAN_S:
        far = f"{latest} comes {last.arrived_s - first.arrived_s:.6g} s after {earliest}"
        raise SettingsError(f"{far}: a trace spans at most {MAX_SPAN_S:g} s; check their times")
    if in_ms:
        _check_unit(len(parsed), last.arrived_s - first.arrived_s)
    _check_ids(parsed)
    return _trace_of([row for row, _ in parsed], path.name.split(".")[0], int(block_size or 512))


def _check_unit(requests: int, span_s: float) -> None:
    """Times in seconds, read as milliseconds, make a thousand times the rate. Raises SettingsError."""
    if requests >= MANY and 0 < span_s * MAX_RATE < requests:
        raise SettingsError(
            f"{requests} requests within {span_s:.6g} s: timestamp is read as milliseconds; "
            "if it is in seconds, multiply it by 1000"
        )


def _check_ids(parsed: Sequence[tuple[_Row, str]]) -> None:
    """Blocks are named by all rows, or by none. Raises SettingsError."""
    without = [place for row, place in parsed if row.ids is None]
    if without and len(without) < len(parsed):
        named_by = len(parsed) - len(without)
        raise SettingsError(
            f"{without[0]}: missing: hash_ids, which {named_by} of {len(parsed)} rows have: "
            "name the blocks of all requests, or of none"
        )


def _trace_of(rows: Sequence[_Row], name: str, block_size: int) -> Trace:
    """Times count from the first request, wherever a trace's own clock began."""
    answers = [row.output for row in rows if not row.is_cut]
    typical = sum(answers) / len(answers) if answers else 1.0
    has_cached = rows[0].cached is not None
    has_ids = all(row.ids is not None for row in rows)
    return Trace(
        name=name,
        arrival_s=np.array([row.arrived_s - rows[0].arrived_s for row in rows]),
        prompt_tokens=np.array([row.prompt for row in rows], dtype=np.float64),
        output_tokens=np.maximum(1.0, [max(typical, row.output) if row.is_cut else row.output for row in rows]),
        blocks=tuple(row.ids or () for row in rows) if has_ids else None,
        block_size=block_size,
        cached_tokens=np.array([row.cached or 0.0 for row in rows]) if has_cached else None,
    )


def _parse(row: Mapping[str, Any]) -> _Row | None:
    """None: a request that is no traffic: it was never read, or was wrong. Raises SettingsError."""
    if "TIMESTAMP" in row:
        prompt, output = (spelled_number(row, key, TOKENS) for key in ("ContextTokens", "GeneratedTokens"))
        return _Row(_unix_s(row["TIMESTAMP"]), prompt, output)
    if "arrived_s" in row:
        return _parse_logged(row)
    if "timestamp" not in row:
        fields = ", ".join(str(key) for key in list(row)[:8]) or "none"
        raise SettingsError(f"fields {fields}: an unknown shape; known are {SHAPES}")
    unit, per_s = (SECONDS, 1.0) if "chat_id" in row else (MILLISECONDS, 1e3)
    arrived_s = number(row, "timestamp", unit) / per_s
    return _Row(arrived_s, number(row, "input_length", TOKENS), number(row, "output_length", TOKENS), _ids(row))


def _parse_logged(row: Mapping[str, Any]) -> _Row | None:
    status = number(row, "status", STATUS) if "status" in row else 200
    total = number(row, "total", TOKENS)
    if not total or (400 <= status < 500 and status not in CUT):
        return None
    return _Row(
        number(row, "unix_s" if "unix_s" in row else "arrived_s", SECONDS),
        total,
        number(row, "output_tokens", TOKENS),
        _ids(row),
        number(row, "cached", TOKENS),
        is_cut=status >= 500 or status in CUT,
    )


def _ids(row: Mapping[str, Any]) -> tuple[int, ...] | None:
    if "hash_ids" not in row:
        return None
    ids = row["hash_ids"]
    are_ids = isinstance(ids, list) and all(type(each) is int and 0 <= each < 1 << ID_BITS for each in ids)
    require(are_ids, "hash_ids", ids, f"a list of integers, at least 0 and below 2^{ID_BITS}")
    return tuple(ids)


def _unix_s(stamp: Any) -> float:
    """A time of Azure's, which is in UTC whether it says so or not."""
    try:
        time = datetime.fromisoformat(stamp.strip())
    except (AttributeError, ValueError) as exc:
        raise SettingsError(f"TIMESTAMP = {shown(stamp)}: must be a time like 2023-11-16 18:17:03.9799600") from exc
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return SECONDS.of("TIMESTAMP", (time - EPOCH).total_seconds())


def poisson(
    lengths: Lengths, output_tokens: float, rate_req_per_s: float, count: int, rng: np.random.Generator
) -> Trace:
    """`count` requests with independent lengths and exponential gaps."""
    if not 0 < rate_req_per_s <= RATE.high:
        raise InputError(f"rate_req_per_s={rate_req_per_s}: must be above 0, and at most {RATE.high:g}")
    return Trace(
        name="poisson",
        arrival_s=np.cumsum(rng.exponential(1 / rate_req_per_s, count)),
        prompt_tokens=np.maximum(1.0, np.round(lengths.sample(count, rng))),
        output_tokens=np.full(count, max(1.0, float(output_tokens))),
    )


def diurnal(
    lengths: Sequence[Lengths], output_tokens: Sequence[float], rates_req_per_s: Sequence[float], bin_s: float,
    rng: np.random.Generator,
) -> Trace:  # fmt: skip
    """Poisson arrivals whose rate, lengths and answers change from bin to bin."""
    parts = []
    for index, (law, output, rate) in enumerate(zip(lengths, output_tokens, rates_req_per_s, strict=True)):
        count = int(rng.poisson(rate * bin_s))
        part = poisson(law, output, 1.0, count, rng)
        at = np.sort(rng.random(count)) * bin_s + index * bin_s
        parts.append(replace(part, arrival_s=at))
    if not any(len(part) for part in parts):
        raise InputError(
            f"rates of {max(rates_req_per_s):g} req/s, bins of {bin_s:g} s: no request arrives; raise one of them"
        )
    return Trace(
        name="diurnal",
        arrival_s=np.concatenate([part.arrival_s for part in parts]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
    )


def infinite_cache_hits(trace: Trace) -> Floats:
    """Tokens of each request that a cache which never evicts would hold: leading blocks seen before."""
    if trace.blocks is None:
        return np.zeros(len(trace))
    seen: set[int] = set()
    hits = np.zeros(len(trace))
    for index, ids in enumerate(trace.blocks):
        count = 0
        for block in ids:
            if block not in seen:
                break
            count += 1
        hits[index] = min(count * trace.block_size, trace.prompt_tokens[index])
        seen.update(ids)
    return hits
