"""Tokens per second of the embedded engine at 1, 4 and 16 answers at once: one forward call per step, or one per answer.

    python -m benchmarks.system.decode [--json] [--models kimi_linear llama | DIRECTORY ...] [--concurrency 1 4 16] [--rounds 5]

Whole requests go through the scheduler, prompts of PROMPT_TOKENS and answers of --tokens, greedy. Both ways take turns
in one run. Seconds are processor time of one thread, from the first step with all answers to the last such step: other
work on the machine counts little, and what prefill takes is left out. Every answer must be the same both ways; the exit
code says so.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.agent.base import Logits
from engine.byte_tokenizer import byte_text
from engine.runtime.sampling import SamplingParams
from engine.runtime.scheduler import Event, ModelWork, NewToken, Scheduler, WorkFailed
from engine.torch.embedded import EmbeddedEngine
from engine.torch.tiny import ARCHITECTURES, build_model

PROMPT_TOKENS = 200
CHUNK_TOKENS = 512
FIRST_PLAIN_TOKEN = 4


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One number of answers at once, of one model. Tokens per processor second, medians of the rounds."""

    model: str
    concurrency: int
    one_by_one: float
    together: float
    ratio: float  # the median of the ratios of each round
    equal: bool


class OneByOne:
    """The engine as it would be without batches."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def decode(self, sequences: Sequence[Any], tokens: Sequence[int]) -> Sequence[Logits]:
        return [self._engine.decode([sequence], [token])[0] for sequence, token in zip(sequences, tokens, strict=True)]


class DecodedAnswers:
    """A scheduler's events of some concurrent requests."""

    def __init__(self, engine: Any, concurrency: int, num_tokens: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(concurrency)]
        self._num_tokens = num_tokens
        self._scheduler = Scheduler(engine, byte_text(), time.perf_counter, chunk_tokens=CHUNK_TOKENS)
        for number, tokens in enumerate(self.tokens):
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            prompt = _prompt(PROMPT_TOKENS + 7 * number, number, engine.vocab_size)
            self._scheduler.add(ModelWork(id=str(number), prompt=prompt, params=params, emit=_into(tokens)))

    def tokens_per_cpu_s(self) -> float:
        """Runs them to the end; what is measured are the steps of all."""
        while not all(self.tokens):
            self._scheduler.step()
        before, started_s = self._count(), time.thread_time()
        while max(map(len, self.tokens)) < self._num_tokens:
            self._scheduler.step()
        tokens_per_s = (self._count() - before) / (time.thread_time() - started_s)
        while not self._scheduler.idle:
            self._scheduler.step()
        return tokens_per_s

    def _count(self) -> int:
        return sum(map(len, self.tokens))


def measure(name: str, engine: EmbeddedEngine, concurrency: int, num_tokens: int, rounds: int) -> DecodeRow:
    speeds, equal = [], True
    for _ in range(rounds):
        ways = [DecodedAnswers(each, concurrency, num_tokens) for each in (OneByOne(engine), engine)]
        speeds.append([way.tokens_per_cpu_s() for way in ways])
        equal &= ways[0].tokens == ways[1].tokens
    one_by_one, together = (statistics.median(way) for way in zip(*speeds, strict=True))
    ratio = statistics.median(after / before for before, after in speeds)
    return DecodeRow(name, concurrency, one_by_one, together, ratio, equal)


def engines(models: Sequence[str], scratch: Path) -> Iterator[tuple[str, EmbeddedEngine]]:
    for model in models:
        directory = Path(model)
        if model in ARCHITECTURES:
            directory = build_model(model, scratch / model, report=lambda line: None).path
        yield directory.name, EmbeddedEngine.load_directory(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer; more than answers at once")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.tokens <= max(options.concurrency) + 1:
        parser.error("--tokens must be above --concurrency: prompts are computed one per step")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, engine in engines(options.models, Path(scratch)):
            for concurrency in options.concurrency:
                rows.append(measure(name, engine, concurrency, options.tokens, options.rounds))
                if not options.json:
                    print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    return 0 if all(row.equal for row in rows) else 1


def line(row: DecodeRow) -> str:
    return (
        f"{row.model:<16}{row.concurrency:>3} at once: {row.one_by_one:>7.0f} tokens/s one by one, "
        f"{row.together:>7.0f} together: {row.ratio:.2f} times; tokens {'equal' if row.equal else 'DIFFER'}"
    )


def _into(tokens: list[int]) -> Callable[[Event], None]:
    def note(event: Event) -> None:
        if isinstance(event, WorkFailed):
            raise event.error
        if isinstance(event, NewToken):
            tokens.append(event.sampled.token)

    return note


def _prompt(count: int, seed: int, vocab_size: int) -> list[int]:
    tokens = np.random.default_rng(seed).integers(FIRST_PLAIN_TOKEN, vocab_size, count)
    return [int(token) for token in tokens]


if __name__ == "__main__":
    sys.exit(main())
