"""Every architecture on every way through the system: route, what is cached where, how the prompt ends, how many at once, and
in how many stages the PrfaaS node computes.

Greedy tokens through gateway, clusters and transfer against a plain transformers.generate in this process, fp32, exact.
Whole in `make test-equality`; CI runs a sample that covers every pair (tests/sampling.py).
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import pytest

from engine.torch.tiny import ARCHITECTURES
from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from tests.equality.sent_home import Record, calm, until_taken
from tests.sampling import SEED_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

THRESHOLD: Final = 300
OUTPUT: Final = 16
MAX_TOKENS: Final = {64: 1024, 256: 2048}
BLOCK_SIZES: Final = tuple(MAX_TOKENS)
ROUTES: Final = ("local", "remote")
PREFIXES: Final = ("none", "prefill", "decode", "both")
BORDERS: Final = (-1, 0, 1, 2, "inside")  # where the prompt ends, as seen from a block border
IN_FLIGHT: Final = (1, 4)
PREFILL_NODE: Final = {"local": "near", "remote": "far"}


@dataclass(frozen=True, slots=True)
class Way:
    """One way through the system. `block_size` in tokens; half of all ways take either."""

    block_size: int
    route: str
    prefix: str
    border: int | str
    in_flight: int

    def __str__(self) -> str:
        return f"{self.route}-{self.prefix}-{self.border}-{self.in_flight}"

    @property
    def primed(self) -> list[str]:
        """The nodes that have the prefix before the prompt comes."""
        at_prefill = [PREFILL_NODE[self.route]] if self.prefix in ("prefill", "both") else []
        at_decode = ["decode0"] if self.prefix in ("decode", "both") else []
        return at_prefill + at_decode

    def reusable(self, cached: int) -> int:
        """How many of `cached` tokens the prefill node has."""
        return cached if self.prefix in ("prefill", "both") else 0

    def plans(self) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens of its cached prefix) of all prompts that can take this way."""
        size = self.block_size
        insides = range(3, size - 2) if self.border == "inside" else [int(self.border)]
        return [
            (length, blocks * size)
            for blocks in (range(1, 4) if self.primed else [0])
            for length in (end * size + inside for end in range(blocks, MAX_TOKENS[size] // size) for inside in insides)
            if blocks * size < length
            and (length - self.reusable(blocks * size) > THRESHOLD) == (self.route == "remote")
        ]


def ways(block_size: int) -> list[Way]:
    """The half of all ways that this block size takes, less those that no prompt can take: every pair is among them."""
    every = product(enumerate(ROUTES), enumerate(PREFIXES), enumerate(BORDERS), enumerate(IN_FLIGHT))
    half = BLOCK_SIZES.index(block_size)
    taken = [
        Way(block_size, route, prefix, border, in_flight)
        for (r, route), (p, prefix), (b, border), (i, in_flight) in every
        if (r + p + b + i) % len(BLOCK_SIZES) == half
    ]
    return [way for way in taken if way.plans()]


def stages_of(arch: str, block_size: int) -> int:
    """Of the PrfaaS node. Every architecture has some with one of the block sizes, every block size with half of the others."""
    turn = ARCHITECTURES.index(arch)
    return 1 if (turn + BLOCK_SIZES.index(block_size)) % 2 == 0 else 2 + turn // 3


def cases() -> list[object]:
    return [
        pytest.param(
            arch,
            way,
            id=f"{arch}-{block_size}-{way}",
            marks=pytest.mark.dimensions(
                way=None, block=block_size,
                route=way.route, prefix=way.prefix, border=way.border, in_flight=way.in_flight,
                stages=stages_of(arch, block_size),
            ),
        )
        for arch in ARCHITECTURES
        for block_size in BLOCK_SIZES
        for way in ways(block_size)
    ]  # fmt: skip


class Benches:
    """One system at a time: cases of one architecture and block size stand together, and share it."""

    def __init__(self, models: Models, state_dir: pytest.TempPathFactory) -> None:
        self._models, self._state_dir = models, state_dir
        self._key: tuple[str, int] | None = None
        self._running = ExitStack()
        self._bench: Bench

    def of(self, arch: str, block_size: int) -> Bench:
        if (arch, block_size) != self._key:
            self.close()
            model = self._models(arch)
            document = topology_document(
                model, threshold=THRESHOLD, block_size=block_size, chunk_tokens=512, cache_bytes=512 << 20
            )
            document["clusters"][0]["nodes"][0]["stages"] = stages_of(arch, block_size)
            self._bench = self._running.enter_context(Bench(document, model, self._state_dir.mktemp(arch)))
            self._running.callback(lambda: self._bench.run(self._bench.wait_idle()))
            self._key = (arch, block_size)
        return self._bench

    def close(self) -> None:
        self._key = None
        self._running.close()


@pytest.fixture(scope="module")
def benches(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    with closing(Benches(models, tmp_path_factory)) as held:
        yield held


@pytest.mark.parametrize(("arch", "way"), cases())
def test_tokens_are_those_of_plain_transformers(benches: Benches, arch: str, way: Way, sent_home: Counter[str]) -> None:
    seed = os.environ.get(SEED_VARIABLE, "")
    rng = np.random.default_rng(list(f"{seed} {arch} {way}".encode()))
    bench = benches.of(arch, way.block_size)
    bench.run(_all_equal(bench, way, rng, sent_home), 580.0)


@dataclass(frozen=True, slots=True)
class Primed:
    """A prompt whose prefix lies where its way wants it, and what a plain transformers.generate gives."""

    prompt: list[int]
    expected: list[int]
    cached: int


async def _all_equal(bench: Bench, way: Way, rng: np.random.Generator, sent_home: Counter[str]) -> None:
    planned = [way.plans()[each] for each in rng.integers(len(way.plans()), size=way.in_flight)]
    primed = [await _primed(bench, way, plan, rng) for plan in planned]
    await asyncio.gather(
        *(_equal(bench, way, first, own, sent_home) for first, own in zip(primed, rng.spawn(len(primed)), strict=True))
    )


async def _primed(bench: Bench, way: Way, plan: tuple[int, int], rng: np.random.Generator) -> Primed:
    length, cached = plan
    prompt, expected = await asyncio.to_thread(bench.untied, length, rng, OUTPUT)
    for node in way.primed:
        await bench.prime(node, prompt[: cached + 1])
    return Primed(prompt, expected, cached)


async def _equal(bench: Bench, way: Way, first: Primed, rng: np.random.Generator, sent_home: Counter[str]) -> None:
    """Asks `first`; where load sends it home, others like it, until one has taken the way."""
    length, cached = len(first.prompt), first.cached

    async def ask(attempt: int) -> Record:
        asked = await _primed(bench, way, (length, cached), rng) if attempt else first
        name = bench.name()
        answer = await bench.generate(asked.prompt, OUTPUT, name=name)
        assert answer.token_ids == asked.expected, f"{length} tokens, {cached} of them cached"
        record = await bench.record(name)
        assert record["fallbacks"] == []
        return record

    record = await until_taken(ask, lambda: calm(bench, length), sent_home)
    found = (record["route"], record["cached"])
    assert found == (way.route, way.reusable(cached)), (length, cached, record["reason"])
