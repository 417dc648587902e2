"""Requests over time: traces read from files, and arrivals made up from a distribution.

Formats, told apart by their fields; files may be plain, or compressed by gzip, xz or zstd:

    Mooncake jsonl   timestamp (ms), input_length, output_length, hash_ids (512 tokens per block)
    Qwen-like jsonl  the same with chat_id; timestamp in SECONDS, 128 tokens per block
    Azure csv        TIMESTAMP (UTC), ContextTokens, GeneratedTokens
    Azure jsonl      timestamp (ms), input_length, output_length
    BurstGPT csv     Timestamp (s), Request tokens, Response tokens
    our request log  unix_s, total, output_tokens, cached, block_tokens, hash_ids, status (a folder of files, or one of them);
                     without blocks: what GET /prfaas/requests of a gateway gives
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from planner.errors import InputError
from planner.model.profile import Floats
from planner.model.reading import RATE, json_rows, named, open_text, placed
from planner.model.trace_files.blocks import Places, leading_seen
from planner.model.trace_files.categories import RequestCategories
from planner.model.trace_files.columns import RequestColumns, RowColumns
from planner.model.trace_files.rows import MOONCAKE_BLOCK, RequestRow, block_size_of, parsed, quickly_parsed
from planner.model.traffic import Lengths
from transport.control.settings import SettingsError

TICK_S: Final = 3.0  # Mooncake's public traces know time in steps of three seconds
TICK_JITTER_S: Final = 0.01  # some ticks are a millisecond early
LOG_FILES: Final = "requests-*.jsonl"  # of a gateway's request log (`gateway/telemetry/request_log.py`)
MAX_SPAN_S: Final = 366 * 86_400.0  # of a trace, and of what is simulated: results are counted by the second
MANY: Final = 100  # requests, whose rate says something of their clock
MAX_RATE: Final = 1_000.0  # requests per second of a trace in milliseconds
LEAST_RATE: Final = 0.01  # requests per second of a trace in whole seconds
_Placed: TypeAlias = tuple[str, int, Mapping[str, Any] | RequestRow]  # file in a folder, number of the row, the row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests sorted by arrival. `blocks[i]` are the ids of request i's full and partial blocks, None without a cache."""

    name: str
    arrival_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    blocks: Sequence[tuple[int, ...]] | None = None
    block_size: int = 512
    cached_tokens: Floats | None = None  # what the system that wrote the trace found cached
    categories: RequestCategories | None = None  # where the trace says any
    sessions: Floats | None = None  # the number of each request's session, where requests come in sessions

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
        return self.part(slice(count))

    def part(self, kept: slice) -> "Trace":
        """Some of the requests, neighbours of each other; they come when they came."""
        return replace(
            self,
            arrival_s=self.arrival_s[kept],
            prompt_tokens=self.prompt_tokens[kept],
            output_tokens=self.output_tokens[kept],
            blocks=self.blocks[kept] if self.blocks is not None else None,
            cached_tokens=self.cached_tokens[kept] if self.cached_tokens is not None else None,
            categories=self.categories.part(kept) if self.categories is not None else None,
            sessions=self.sessions[kept] if self.sessions is not None else None,
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
            for _, line, row in _rows_of(path):
                yield f"{path.name}, ", line, row


def _rows_of(path: Path) -> Iterator[_Placed]:
    with open_text(path) as text:
        if ".csv" not in [suffix.lower() for suffix in path.suffixes]:
            for line, each in _json_rows_of(text, path.match(LOG_FILES)):
                yield "", line, each
            return
        try:
            for line, row in enumerate(csv.DictReader(text), 1):
                yield "", line, row
        except csv.Error as exc:
            raise SettingsError(f"not CSV: {exc}") from exc


def _json_rows_of(text: Iterator[str], is_growing: bool) -> Iterator[tuple[int, Mapping[str, Any] | RequestRow]]:
    """Mooncake's rows are read quickly, and all from the first one on that may be something else as objects."""
    for at, line in enumerate(text, 1):
        if not line.strip():
            continue
        if (row := quickly_parsed(line)) is None:
            yield from json_rows(chain([line], text), is_growing, first=at)
            return
        yield at, row


def _to_trace(path: Path, rows: Iterable[_Placed]) -> Trace:
    columns, in_ms, in_s = RowColumns(), False, False
    block_size: int | None = None
    each: RequestRow | None
    for file, line, row in rows:
        try:
            if isinstance(row, RequestRow):
                size, each, in_ms = MOONCAKE_BLOCK, row, True
            else:
                size, each = block_size_of(row), parsed(row)
                in_ms = in_ms or ("timestamp" in row and "chat_id" not in row)
                in_s = in_s or "chat_id" in row
            if block_size not in (None, size):
                raise SettingsError(f"blocks of {size} tokens, of {block_size} before")
            block_size = size
            if each is not None:
                columns.append(each, file, line)
        except SettingsError as exc:
            raise SettingsError(f"{file}row {line}: {exc}") from exc
    if not len(columns):
        raise SettingsError("empty; at least one request is needed")
    order = columns.order()
    _check_times(columns, int(order[0]), int(order[-1]))
    _check_names(columns, order)
    found = columns.sorted_by(order)
    _check_unit(found.arrived_s, in_ms, in_s)
    return _trace_of(found, path.name.split(".")[0], block_size or 512)


def _check_times(columns: RowColumns, first: int, last: int) -> None:
    span_s = columns.arrived_s(last) - columns.arrived_s(first)
    if span_s > MAX_SPAN_S:
        far = f"{columns.place(last)} comes {span_s:.6g} s after {columns.place(first)}"
        raise SettingsError(f"{far}: a trace spans at most {MAX_SPAN_S:g} s; check their times")


def _check_unit(arrived_s: Floats, in_ms: bool, in_s: bool) -> None:
    """Seconds read as milliseconds make a thousand times the rate, and milliseconds read as seconds a thousandth.

    Raises SettingsError.
    """
    requests, span_s = len(arrived_s), float(arrived_s[-1] - arrived_s[0])
    if requests < MANY or span_s <= 0:
        return
    if in_ms and span_s * MAX_RATE < requests:
        raise SettingsError(
            f"{requests} requests within {span_s:.6g} s: timestamp is read as milliseconds; "
            "if it is in seconds, multiply it by 1000"
        )
    if in_s and span_s * LEAST_RATE > requests and not (arrived_s % 1).any():
        raise SettingsError(
            f"{requests} requests within {span_s:.6g} s, all at whole seconds: timestamp is read as seconds; "
            "if it is in milliseconds, divide it by 1000"
        )


def _check_names(columns: RowColumns, order: Places) -> None:
    """Blocks are named by all rows, or by none. Raises SettingsError."""
    named_by, without = columns.nameless(order)
    if named_by and without is not None:
        raise SettingsError(
            f"{columns.place(without)}: missing: hash_ids, which {named_by} of {len(columns)} rows have: "
            "name the blocks of all requests, or of none"
        )


def _trace_of(found: RequestColumns, name: str, block_size: int) -> Trace:
    """Times count from the first request, wherever a trace's own clock began."""
    answers = found.output_tokens[~found.is_cut]
    typical = float(answers.mean()) if len(answers) else 1.0
    output = np.where(found.is_cut, np.maximum(typical, found.output_tokens), found.output_tokens)
    return Trace(
        name=name,
        arrival_s=found.arrived_s - found.arrived_s[0],
        prompt_tokens=found.prompt_tokens,
        output_tokens=np.maximum(1.0, output),
        blocks=found.blocks,
        block_size=block_size,
        cached_tokens=found.cached_tokens,
        categories=found.categories,
    )


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
    counts = np.fromiter(leading_seen(trace.blocks), dtype=np.float64, count=len(trace))
    return np.minimum(counts * trace.block_size, trace.prompt_tokens)
