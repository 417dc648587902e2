"""Recorded requests with block chains: the public Mooncake and Qwen-Bailian formats.

Mooncake: timestamps in milliseconds, 512 tokens per block. Qwen-Bailian (rows with a `turn`): seconds, and request types.
"""

import io
import json
import lzma
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request. `path` are its block ids from the root, the last block may be partial; `turn` is 0 where not recorded."""

    now: float
    path: tuple[int, ...]
    input_length: int
    type: str
    turn: int


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    name: str
    block_size: int
    rows: Sequence[RecordedRequest]

    @property
    def blocks(self) -> int:
        return sum(len(row.path) for row in self.rows)

    @property
    def footprint(self) -> int:
        """Different blocks."""
        return len({key for row in self.rows for key in row.path})

    def half(self, number: int) -> "RecordedTrace":
        """The first or second half of the requests as a trace of its own, whose clock begins at 0."""
        middle = len(self.rows) // 2
        rows = self.rows[:middle] if number == 1 else self.rows[middle:]
        started = rows[0].now
        return replace(self, rows=[replace(row, now=row.now - started) for row in rows])


def read_trace(path: Path) -> RecordedTrace:
    """Reads .jsonl, .jsonl.xz or .jsonl.zst. Raises ValueError for rows without block ids."""
    with _open_text(path) as lines:
        tables = [json.loads(line) for line in lines if line.strip()]
    if not tables or "hash_ids" not in tables[0]:
        raise ValueError(f"{path.name} has no hash_ids: it says nothing about prefixes")
    seconds = "turn" in tables[0] or "chat_id" in tables[0]
    rows = [_row(table, 1.0 if seconds else 1e-3) for table in tables]
    return RecordedTrace(path.name.split(".")[0], _block_size(rows), rows)


def _row(table: dict[str, Any], unit_s: float) -> RecordedRequest:
    return RecordedRequest(
        now=table["timestamp"] * unit_s,
        path=tuple(table["hash_ids"]),
        input_length=table["input_length"],
        type=table.get("type", ""),
        turn=table.get("turn", 0),
    )


def _block_size(rows: Sequence[RecordedRequest]) -> int:
    """The block size that len(path) == ceil(input_length / block_size) implies; the known ones are powers of two."""
    sizes = [2**n for n in range(4, 13)]
    return next(size for size in sizes if all(-(-row.input_length // size) <= len(row.path) for row in rows))


@contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    match path.suffix:
        case ".xz":
            with lzma.open(path, "rt") as lines:
                yield lines
        case ".zst":
            import zstandard

            with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as data:
                yield io.TextIOWrapper(data, "utf-8")
        case _:
            with path.open() as lines:
                yield lines


def turns(rows: Sequence[RecordedRequest]) -> list[int]:
    """The turn of each request in its conversation, inferred from prefixes where it was not recorded.

    A request that contains all full blocks of the last request with the same prefix continues it.
    """
    last: dict[int, int] = {}
    result: list[int] = []
    for index, row in enumerate(rows):
        known = next((k for k, key in enumerate(row.path) if key not in last), len(row.path))
        turn = 1
        if known:
            before = last[row.path[known - 1]]
            size = len(rows[before].path)
            if known >= size - 1 and size >= 2 and len(row.path) >= size:
                turn = result[before] + 1
        result.append(row.turn or turn)
        last.update(dict.fromkeys(row.path, index))
    return result


def categories(rows: Sequence[RecordedRequest]) -> list[str]:
    """Request type and bucket of the turn, as the workload-aware policy groups requests."""
    names = []
    for row, turn in zip(rows, turns(rows), strict=True):
        bucket = str(turn) if turn <= 4 else "5-8" if turn <= 8 else "9+"
        names.append(f"{row.type or 'x'}_{bucket}")
    return names
