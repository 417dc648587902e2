"""Times the hot operations of the cache. Each figure is the best of several runs: what the code takes when it has the core."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.eviction.pools import ChainPool
from hybrid_cache.cache.events import BlocksStored
from hybrid_cache.cache.pool import PagePool
from hybrid_cache.eviction.base import Use
from hybrid_cache.eviction.density import ReuseDensity
from hybrid_cache.eviction.workload import ReuseFit, WorkloadAware
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.hashing.name_secrets import NameSecrets
from hybrid_cache.index.index import PrefixIndex
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from hybrid_cache.tiers.slots import CheckedSlots, SealedSlots, SlotBlock, SlotFormat

BLOCK_SIZE = 64
PROMPT_TOKENS = 131_072
INDEX_BLOCKS = 1_000_000
EVENT_BLOCKS = 2048  # as a gateway takes them in, one part after the other
FULL_ONLY = ModelLayout("speed", "bfloat16", BLOCK_SIZE, (KVCacheGroup(FullAttention(1152, 1152), (0,)),))
HYBRID = ModelLayout("speed", "bfloat16", BLOCK_SIZE, (*FULL_ONLY.groups, KVCacheGroup(LinearState(4_000_000), (1,))))


def measure() -> list[dict[str, str | int | float]]:
    hashing_s, keyed_s, rotating_s = (best(partial(hashing, salts), 9) for salts in SALTS)
    index, chain, bytes_per_block = million_blocks(FULL_ONLY)
    match_s = best(lambda: index.match("n", chain, PROMPT_TOKENS), 50)
    hybrid, chain, _ = million_blocks(HYBRID)
    hybrid.apply("n", BlocksStored(1, (chain[0],)))
    hybrid_s = best(lambda: hybrid.match("n", chain, PROMPT_TOKENS), 50)
    storing_s, dropping_s = rebuild_s()
    return [
        row("page allocations and frees, batches of 64", pages_per_s(), "1/s", ">= 1e6"),
        row("hashes of 128K tokens, block 64", hashing_s * 1e3, "ms", "< 1.5"),
        row("same, by a secret", keyed_s * 1e3, "ms", "< 1.5"),
        row("same, while a secret replaces another", rotating_s * 1e3, "ms", "< 3"),
        row("match of 128K tokens in 1M blocks", match_s * 1e3, "ms", "<= 0.5"),
        row("same, hybrid, only an early snapshot", hybrid_s * 1e3, "ms", "<= 0.5"),
        row("memory per indexed block", bytes_per_block, "B", "<= 200"),
        row("longest step of taking in 1M blocks", storing_s * 1e3, "ms", "<= 5"),
        row("longest step of dropping them", dropping_s * 1e3, "ms", "<= 5"),
        row("sealing a state for the SSD tier", state_gb_per_s(SealedSlots(bytes(32), "speed")), "GB/s", "-"),
        row("checking it, if it is not sealed", state_gb_per_s(CheckedSlots()), "GB/s", "-"),
        row("longest step of sealing it", longest_step_s(SealedSlots(bytes(32), "speed")) * 1e3, "ms", "<= 5"),
        row("one workload-aware eviction, 100 categories", workload_eviction_s(1) * 1e6, "us", "<= 5"),
        row("same, 20 evictions per point in time", workload_eviction_s(20) * 1e6, "us", "<= 5"),
        row("default eviction, with its learning, all told", default_eviction_s() * 1e6, "us", "-"),
    ]


def row(what: str, value: float, unit: str, bar: str) -> dict[str, str | int | float]:
    return {"what": what, "value": float(f"{value:.4g}"), "unit": unit, "bar": bar}


def best(run: Callable[[], object], times: int) -> float:
    return min(timed(run) for _ in range(times))


def cpu_s(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def hashing(salts: Sequence[bytes]) -> None:
    for salt in salts:
        block_hashes(TOKENS, BLOCK_SIZE, salt)


SALTS = tuple(NameSecrets.of(text).model_salts("speed") for text in ("none", "a1" * 32, f"{'a1' * 32}\nnone"))
TOKENS = np.random.default_rng(0).integers(0, 150_000, PROMPT_TOKENS).astype("<u4")


def pages_per_s() -> float:
    pool = PagePool(100_000)

    def run() -> None:
        for _ in range(1000):
            pool.free(pool.allocate(64))

    return 2 * 64 * 1000 / best(run, 7)


def million_blocks(layout: ModelLayout) -> tuple[PrefixIndex, list[bytes], float]:
    """An index of 1M blocks; the chain of a prompt that is in it; bytes per block, hashes included."""
    chain = block_hashes(TOKENS, BLOCK_SIZE, b"salt")
    rng = np.random.default_rng(1)
    index = PrefixIndex(layout)
    index.apply("n", BlocksStored(0, tuple(rng.bytes(32) for _ in range(INDEX_BLOCKS - len(chain)))))
    index.apply("n", BlocksStored(0, tuple(chain)))
    return index, chain, index.memory_bytes / len(index)


def rebuild_s() -> tuple[float, float]:
    """The longest step of taking in a node's 1M blocks, and of dropping them; CPU, which no neighbour lengthens."""
    rng = np.random.default_rng(1)
    index = PrefixIndex(FULL_ONLY)
    parts = [tuple(rng.bytes(32) for _ in range(EVENT_BLOCKS)) for _ in range(INDEX_BLOCKS // EVENT_BLOCKS)]
    storing_s = max([cpu_s(lambda part=part: index.apply("n", BlocksStored(0, part))) for part in parts])
    dropping_s = [cpu_s(lambda: index.drop("n"))]
    while len(index):
        dropping_s.append(cpu_s(index.tidy))
    return storing_s, max(dropping_s)


def state_gb_per_s(slots: SlotFormat) -> float:
    return STATE_BYTES / best(lambda: write_state(slots, lambda: None), 5) / 1e9


def longest_step_s(slots: SlotFormat) -> float:
    """Between two writes to disk; CPU of this thread, which no neighbour lengthens."""
    moments = [time.thread_time()]
    write_state(slots, lambda: moments.append(time.thread_time()))
    return float(np.diff(moments).max())


def write_state(slots: SlotFormat, on_put: Callable[[], object]) -> None:
    slots.write(SlotBlock(0, STATE_BYTES, bytes(32)), PIECES, lambda at, parts: on_put())


STATE_BYTES = 174 << 20  # of a linear state of a large model
PIECES = [np.ones(1 << 20, np.uint8).data for _ in range(STATE_BYTES >> 20)]


def workload_eviction_s(at_once: int) -> float:
    """`at_once` evictions per point in time; each category has a rate and a probability of its own."""
    fits = {f"category {i}": ReuseFit(rate=1 / (10 + 7 * i), probability=(i * 37 % 100 + 1) / 101) for i in range(100)}
    policy = WorkloadAware(fits=fits)
    for start in range(0, 200_000, 20):
        path = list(range(start, start + 20))
        policy.begin(Use(start * 1e-3, path, f"category {start // 20 % 100}"))
        for key in reversed(path):
            policy.touch(key, start * 1e-3)
            policy.offer(key, start * 1e-3)
    moment = iter(range(1_000_000))

    def run() -> None:
        for _ in range(4000 // at_once):
            now = 200 + next(moment) * at_once * 1e-3
            for _ in range(at_once):
                policy.pop_victim(now)

    return best(run, 40) / 4000


def default_eviction_s() -> float:
    """A full pool of 20,000 blocks and requests that are all new: twenty evictions each."""
    pool = ChainPool(20_000, ReuseDensity())
    moment = iter(range(0, 10_000_000, 20))

    def run() -> None:
        for start in (next(moment) for _ in range(100)):
            pool.request(Use(start * 1e-3, range(start, start + 20)))

    for _ in range(15):
        run()
    return best(run, 15) / 2000
