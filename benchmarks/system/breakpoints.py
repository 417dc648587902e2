"""The gain of a mark in a prompt for a hybrid model: `python -m benchmarks.system.breakpoints [--json] [--arch NAME]`.

Several documents, each the system prompt of one question after the other: all first questions, then all second ones, and so on.
Questions differ from their first word on. A model with linear states can go on only from a length at which a state was kept:

    unmarked    a state at each prompt's end, and from the second question on where the prompts have parted
    marked      a state at the end of the document, from the first question on; and the document stays in memory

Once in a memory that has room for all of it, once in one that has not and between each two rounds sees other prompts. Gateway,
agent and engine are real processes; the model's time is emulated, KVCache and states are checked as they are read.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import aiohttp

from engine.byte_tokenizer import save_byte_tokenizer
from prfaas.system.system import System
from prfaas.system.topology import parse_topology

DOCUMENTS: Final = 4
QUESTIONS: Final = (
    "Who wrote it, and when? " * 10,
    "Is it true? " * 20,
    "What follows from that? " * 10,
)  # longer than a block
DOCUMENT_CHARS: Final = 3000  # each a token
BLOCK: Final = 64
PER_TOKEN_S: Final = 200e-6
ROOMY_BYTES, TIGHT_BYTES = 256 << 20, 14 << 20
OTHERS: Final = 12  # prompts between two rounds
CHUNK_LINE: Final = b"data: {"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakpointsRow:
    """One round of questions, a question of each document: means of tokens, median of seconds."""

    memory: str
    is_marked: bool
    question: int
    prompt_tokens: float
    cached_tokens: float
    computed_tokens: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class QuestionAsked:
    """One request."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@contextmanager
def system_of(arch: str, cache_bytes: int) -> Iterator[System]:
    """A node that computes its prompts itself, as it may be anywhere."""
    with tempfile.TemporaryDirectory(prefix="prfaas-breakpoints-") as name:
        directory = Path(name)
        model = directory / "models" / f"{arch}-0"
        model.mkdir(parents=True)
        save_byte_tokenizer(model, 4096)
        document = {
            "model": {"arch": arch, "name": "model"},
            "gateway": {"port": 0},
            "node": {
                "engine": "emulated",
                "cache_bytes": cache_bytes,
                "block_size": BLOCK,
                "engine_args": ["--prefill-per-token-s", str(PER_TOKEN_S)],
            },
            "clusters": [{"name": "west", "kind": "pd", "nodes": [{"node_id": "d0", "role": "decode"}]}],
        }
        yield System(parse_topology(document, directory), directory / "run", lambda line: None)


def document_of(number: int) -> str:
    """A text that no other begins like."""
    return (f"Document {number} says what document {number} says. " * (1 + DOCUMENT_CHARS // 40))[:DOCUMENT_CHARS]


async def ask(http: aiohttp.ClientSession, document: str, question: str, *, is_marked: bool) -> QuestionAsked:
    """A question about a document, streamed."""
    part: dict[str, Any] = {"type": "text", "text": document}
    if is_marked:
        part["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "5m"}
    body = {
        "model": "model",
        "messages": [{"role": "system", "content": [part]}, {"role": "user", "content": question}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, usage = time.monotonic(), 0.0, {}
    async with http.post("/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(CHUNK_LINE):
                first = first or time.monotonic()
                usage = json.loads(line.removeprefix(b"data: ")).get("usage") or usage
    return QuestionAsked(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], first - began)


async def rounds(arch: str, memory: str, cache_bytes: int, *, is_marked: bool) -> list[BreakpointsRow]:
    """Every question about every document."""
    rows = []
    with system_of(arch, cache_bytes) as system:
        async with system, aiohttp.ClientSession(system.api_url) as http:
            for number, question in enumerate(QUESTIONS):
                asked = [await ask(http, document_of(each), question, is_marked=is_marked) for each in range(DOCUMENTS)]
                rows.append(
                    BreakpointsRow(
                        memory=memory,
                        is_marked=is_marked,
                        question=number + 1,
                        prompt_tokens=mean(each.prompt_tokens for each in asked),
                        cached_tokens=mean(each.cached_tokens for each in asked),
                        computed_tokens=mean(each.prompt_tokens - each.cached_tokens for each in asked),
                        ttft_s=median(each.ttft_s for each in asked),
                    )
                )
                if memory == "tight":
                    for other in range(OTHERS):
                        text = document_of(1000 * (number + 1) + other)
                        await ask(http, text, "Does it matter?", is_marked=False)
    return rows


async def measure(arch: str) -> list[BreakpointsRow]:
    """Each memory, unmarked and marked, with new processes."""
    rows = []
    for memory, cache_bytes in (("roomy", ROOMY_BYTES), ("tight", TIGHT_BYTES)):
        for is_marked in (False, True):
            rows += await rounds(arch, memory, cache_bytes, is_marked=is_marked)
    return rows


def table(rows: list[BreakpointsRow]) -> str:
    """For people."""
    lines = ["| memory | question | marked | cached | computed | TTFT, ms |", "|---|---|---|---|---|---|"]
    for row in rows:
        mark = "yes" if row.is_marked else "no"
        lines.append(
            f"| {row.memory} | {row.question} | {mark} | {row.cached_tokens:,.0f} | {row.computed_tokens:,.0f} "
            f"| {1e3 * row.ttft_s:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The gain of a mark in a prompt for a hybrid model")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arch", default="kimi_linear", help="as `--emulate` of the engine names it")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.arch))
    print(json.dumps([asdict(row) for row in rows]) if arguments.json else table(rows))
    if not arguments.json:
        print(f"\nload average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
