"""Requests over time: traces read from files, and arrivals made up from a distribution.

Formats, told apart by their fields; files may be plain, .xz or .zst:

    Mooncake jsonl   timestamp (ms), input_length, output_length, hash_ids (512 tokens per block)
    Qwen-like jsonl  the same with chat_id; timestamp in SECONDS, 128 tokens per block
    Azure csv        TIMESTAMP, ContextTokens, GeneratedTokens
    Azure jsonl      timestamp (ms), input_length, output_length
    our request log  unix_s, total, output_tokens, cached, block_tokens, hash_ids, status (a folder of files, or one of them);
                     without blocks: what GET /prfaas/requests of a gateway gives
"""

import csv
import io
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from planner.errors import InputError
from planner.model.profile import Floats
from planner.model.traffic import Lengths

TICK_S: Final = 3.0  # Mooncake's public traces know time in steps of three seconds
TICK_JITTER_S: Final = 0.01  # some ticks are a millisecond early
LOG_FILES: Final = "requests-*.jsonl"  # of a gateway's request log (`gateway/request_log.py`)
REFUSED: Final = (429, 503)  # statuses of requests that a larger system would have served


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

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def faster(self, factor: float) -> "Trace":
        """The same requests at `factor` times the rate."""
        if factor <= 0:
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
    """Reads any of the formats above. Raises InputError naming the file, and the line where there is one."""
    if path.is_dir():
        return _read_log(path)
    try:
        text = _open(path)
    except FileNotFoundError as exc:
        raise InputError(f"trace {path}: no such file") from exc
    except (OSError, lzma.LZMAError) as exc:
        raise InputError(f"trace {path}: {exc}") from exc
    with text:
        rows = csv.DictReader(text) if ".csv" in path.suffixes else _json_lines(text, path)
        return _to_trace(path, rows)


def _read_log(directory: Path) -> Trace:
    """All files of a gateway's request log: its workers each have their own, and begin a new one now and then."""
    paths = sorted(directory.glob(LOG_FILES))
    if not paths:
        raise InputError(f"trace {directory}: no files called {LOG_FILES} in it")
    with ExitStack() as opened:
        rows = [_json_lines(opened.enter_context(path.open()), path) for path in paths]
        return _to_trace(directory, chain.from_iterable(rows))


def _open(path: Path) -> Any:
    if path.suffix == ".xz":
        return lzma.open(path, "rt")
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as exc:
            raise InputError(f"trace {path}: reading .zst needs the zstd extra (pip install 'prfaas[zstd]')") from exc
        return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
    return path.open()


def _json_lines(text: Any, path: Path) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as exc:
            if not line.endswith("\n") and number > 1:  # somebody is still writing it
                return
            raise InputError(f"trace {path}, line {number}: not JSON ({exc})") from exc


@dataclass(frozen=True, slots=True)
class _Row:
    arrived_s: float
    prompt: float
    output: float
    ids: tuple[int, ...] | None = None
    cached: float | None = None
    is_refused: bool = False


def _to_trace(path: Path, rows: Any) -> Trace:
    parsed: list[_Row] = []
    block_size = 512
    for number, row in enumerate(rows, 1):
        try:
            if (each := _parse(row)) is not None:
                parsed.append(each)
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"trace {path}, row {number}: {type(exc).__name__} {exc}") from exc
        if number == 1:
            block_size = row.get("block_tokens", 128 if "chat_id" in row else block_size)
        elif row.get("block_tokens", block_size) != block_size:
            raise InputError(
                f"trace {path}, row {number}: blocks of {row['block_tokens']} tokens, of {block_size} before"
            )
    if not parsed:
        raise InputError(f"trace {path}: empty; at least one request is needed")
    has_cached = parsed[0].cached is not None
    parsed.sort(key=lambda row: row.arrived_s)
    # Clocks that began long before the trace count from its first request.
    first = parsed[0].arrived_s if parsed[0].arrived_s > 1e6 or has_cached else 0.0
    has_ids = all(row.ids is not None for row in parsed)
    answers = [row.output for row in parsed if not row.is_refused]
    typical = (
        sum(answers) / len(answers) if answers else 1.0
    )  # of what was refused: nobody knows how long it would have been
    return Trace(
        name=path.name.split(".")[0],
        arrival_s=np.array([row.arrived_s - first for row in parsed]),
        prompt_tokens=np.array([row.prompt for row in parsed], dtype=np.float64),
        output_tokens=np.maximum(1.0, [typical if row.is_refused else row.output for row in parsed]),
        blocks=tuple(row.ids or () for row in parsed) if has_ids else None,
        block_size=block_size,
        cached_tokens=np.array([row.cached or 0.0 for row in parsed]) if has_cached else None,
    )


def _parse(row: Mapping[str, Any]) -> _Row | None:
    """None: a request that asked for nothing, for it was never read."""
    if "TIMESTAMP" in row:
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
        return _Row(stamp.timestamp(), float(row["ContextTokens"]), float(row["GeneratedTokens"]))
    if "arrived_s" in row:
        if not row["total"]:
            return None
        return _Row(
            row.get("unix_s", row["arrived_s"]),
            row["total"],
            row["output_tokens"],
            tuple(row["hash_ids"]) if "hash_ids" in row else None,
            row["cached"],
            is_refused=row.get("status") in REFUSED,
        )
    unit = 1.0 if "chat_id" in row else 1e-3
    ids = tuple(row["hash_ids"]) if "hash_ids" in row else None
    return _Row(row["timestamp"] * unit, row["input_length"], row["output_length"], ids)


def poisson(
    lengths: Lengths, output_tokens: float, rate_req_per_s: float, count: int, rng: np.random.Generator
) -> Trace:
    """`count` requests with independent lengths and exponential gaps."""
    if rate_req_per_s <= 0:
        raise InputError(f"rate_req_per_s={rate_req_per_s}: must be above 0")
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
