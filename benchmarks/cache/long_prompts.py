"""What a node's prefix cache takes of a long prompt: `python -m benchmarks.cache.long_prompts [--rounds 6] [--json]`.

Reserve, learn, store and release, with the default eviction policy, at the number of blocks of models that people serve.
`new`: nothing of it is cached. `cached`: all of it but its end. `full`: as new, where the blocks of others have to leave.
CPU of the thread in ms, the best of the rounds; each is one end of a transfer, and two ends take twice that.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from benchmarks.lib.sized_models import MODELS
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.eviction.choice import default_policy
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import ModelLayout

SIZES: Final = (("dense-70b", 16, 1_000_000), ("qwen3-next", 64, 1_000_000), ("qwen3-next", 64, 131_072))
ROOM: Final = 1.25  # for one prompt, and the beginning of another
SCALE: Final = 1024  # of bytes, which no operation of the cache touches


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPromptRow:
    """`block_us`: of a new prompt, for one block."""

    model: str
    blocks: int
    new_ms: float
    cached_ms: float
    full_ms: float
    block_us: float


class Cache:
    """Room for one such prompt. Time goes on by a second with each."""

    def __init__(self, layout: ModelLayout, num_tokens: int) -> None:
        blocks = num_tokens // layout.block_size
        of_block = sum(layout.pages_per_block(group) for group in layout.full_groups)
        of_states = sum(layout.pages_per_block(group) for group in layout.state_groups)
        pages = int(ROOM * (blocks * of_block + 64 * of_states))
        self._cache = PrefixCache(layout, pages, eviction=default_policy(layout))
        self._num_tokens, self._now = num_tokens, 0.0

    def serve(self, hashes: list[bytes]) -> float:
        """CPU of a prompt, in ms."""
        self._now += 1.0
        began = time.thread_time()
        reserved = self._cache.reserve("r", hashes, self._num_tokens, now=self._now, purpose=Purpose.PREFILL)
        self._cache.commit("r", reserved.num_tokens, self._now)
        self._cache.release("r", self._now)
        took = time.thread_time() - began
        self._cache.take_events()
        return took * 1e3


def rows(rounds: int) -> Iterator[LongPromptRow]:
    """One for each of SIZES."""
    for name, block_tokens, num_tokens in SIZES:
        layout = MODELS[name].layout(block_tokens, SCALE)
        prompts = [block_hashes([token] * num_tokens, block_tokens, b"") for token in range(2)]
        new, cached, full = [], [], []
        for _ in range(rounds):
            cache = Cache(layout, num_tokens)
            new.append(cache.serve(prompts[0]))
            cached.append(cache.serve(prompts[0]))
            full.append(cache.serve(prompts[1]))
        blocks = num_tokens // block_tokens
        yield LongPromptRow(
            model=name,
            blocks=blocks,
            new_ms=min(new),
            cached_ms=min(cached),
            full_ms=min(full),
            block_us=min(new) * 1e3 / blocks,
        )


def main(arguments: argparse.Namespace) -> None:
    found = list(rows(arguments.rounds))
    if arguments.json:
        print(json.dumps([asdict(row) for row in found]))
        return
    print("model        blocks   new ms  cached ms  full ms  us a block")
    for row in found:
        print(
            f"{row.model:11}  {row.blocks:6}  {row.new_ms:7.1f}  {row.cached_ms:9.1f}  {row.full_ms:7.1f}  {row.block_us:10.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache.long_prompts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    main(parser.parse_args())
