"""A trace as requests that a tiny model can serve: lengths divided by a stated factor, prefix sharing kept.

One hash id of the trace stands for one block of text. Here it becomes one block of `block_chars` characters, equal wherever the
id is equal; with a byte-level tokenizer a character is a token, so prompts share exactly the prefixes that the trace's share.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRACE_BLOCK_TOKENS = 512
TICK_S = 3.0
"""The conversation trace has timestamps on 3-second ticks; requests of one tick are spread over it."""
SLICE = Path(__file__).parents[1] / "data" / "conversation_slice.jsonl"
_WORDS = (
    *("kv", "cache", "prefill", "decode", "node", "layer", "block", "state", "link", "token", "route", "plan"),
    *("hash", "page", "egress", "window", "lease", "chunk", "queue", "cluster", "linear", "hybrid", "prefix"),
    *("engine", "arena", "stream", "batch", "gate", "tail", "head"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace, in the trace's own units: ms and tokens."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """One request to send `at_s` seconds after the start."""

    name: str
    at_s: float
    prompt: str
    max_tokens: int


def read_rows(path: Path = SLICE) -> list[TraceRow]:
    """The rows of a Mooncake-style .jsonl file. Raises ValueError naming the line."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            rows.append(
                TraceRow(
                    timestamp_ms=float(entry["timestamp"]),
                    input_length=int(entry["input_length"]),
                    output_length=int(entry["output_length"]),
                    hash_ids=tuple(entry["hash_ids"]),
                )
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"{path}:{number}: not a trace row: {exc!r}") from exc
    return rows


def scaled(rows: Iterable[TraceRow], factor: int, speed: float, rng: np.random.Generator) -> list[ReplayRequest]:
    """The rows with lengths divided by `factor` and time by `speed`, in order of arrival."""
    requests = [
        ReplayRequest(
            name=f"conv-{index:03d}",
            at_s=(row.timestamp_ms / 1000 + rng.uniform(0, TICK_S)) / speed,
            prompt=prompt_text(row.hash_ids, -(-row.input_length // factor), TRACE_BLOCK_TOKENS // factor),
            max_tokens=max(1, row.output_length // factor),
        )
        for index, row in enumerate(rows)
    ]
    return sorted(requests, key=lambda request: request.at_s)


def prompt_text(hash_ids: Iterable[int], num_chars: int, block_chars: int) -> str:
    """The first `num_chars` characters of the blocks' texts. The last block may be cut, as in the trace."""
    return "".join(block_text(block, block_chars) for block in hash_ids)[:num_chars]


def block_text(block: int, num_chars: int) -> str:
    """A block's text: words drawn by the block's id, so that equal ids have equal text and others do not."""
    return "".join(_words(np.random.default_rng(block), num_chars))[:num_chars]


def _words(rng: np.random.Generator, num_chars: int) -> Iterator[str]:
    produced = 0
    while produced < num_chars:
        word = f"{_WORDS[rng.integers(len(_WORDS))]}{rng.integers(1000)} "
        produced += len(word)
        yield word
