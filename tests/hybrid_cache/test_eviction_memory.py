"""What a policy remembers has a bound: however many requests come, over however few blocks."""

import random
import tracemalloc

import pytest

from hybrid_cache.eviction import POLICIES, EvictionPolicy, Use
from hybrid_cache.eviction.density import ReuseDensity
from hybrid_cache.eviction.reuse import BYTES_PER_BLOCK, ReuseModel
from hybrid_cache.eviction.snapshot_density import SnapshotDensity
from tests.hybrid_cache.builders import FULL, STATE, WINDOW, make_layout
from tests.hybrid_cache.sizes import size_of

KEYS = [number.to_bytes(32) for number in range(500)]
RESIDENT = 400
HYBRID = make_layout(FULL, WINDOW, STATE)
POLICY_NAMES = [*POLICIES, "snapshots"]


def make(name: str) -> EvictionPolicy:
    return SnapshotDensity(HYBRID) if name == "snapshots" else POLICIES[name](RESIDENT)


class Soak:
    """Requests of one to three of 500 blocks; the pool holds 400 of them."""

    def __init__(self, name: str, requests_per_s: float) -> None:
        self.policy = make(name)
        self.step_s = 1.0 / requests_per_s
        self.rng = random.Random(1)
        self.resident: set[bytes] = set()
        self.requests = 0

    def run(self, requests: int) -> int:
        """Bytes that the policy takes after so many more requests."""
        for _ in range(requests):
            self.request()
        return size_of(self.policy)

    def request(self) -> None:
        policy, now = self.policy, self.requests * self.step_s
        start = int(500 * self.rng.random() ** 2)
        path = KEYS[start : start + 1 + self.requests % 3]
        policy.begin(Use(now, path, f"category {self.requests % 7}"))
        for key in path:
            if key in self.resident:
                policy.withdraw(key)
        for key in reversed(path):
            policy.touch(key, now)
        for key in path:
            policy.offer(key, now)
        self.resident.update(path)
        while len(self.resident) > RESIDENT:
            self.resident.remove(policy.pop_victim(now))
        self.requests += 1


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_memory_is_flat(name):
    soak = Soak(name, 1000.0)
    early = soak.run(5000)
    assert soak.run(10_000) <= 1.3 * early + (64 << 10)


@pytest.mark.parametrize("name", ["default", "wa"])
def test_names_of_categories_that_clients_make_up_are_bounded(name):
    policy = make(name)

    def ask(numbers: range) -> int:
        for number in numbers:
            policy.begin(Use(number * 1e-3, KEYS[:1], f"category {number}"))
        return size_of(policy)

    early = ask(range(500))
    assert ask(range(500, 2000)) <= 1.5 * early


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_memory_is_flat_over_a_million_requests(name):
    soak = Soak(name, 100.0)
    early = soak.run(100_000)  # 1,000 s: what counts over a window of ten minutes has filled it
    assert soak.run(900_000) <= 1.3 * early + (64 << 10)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_offers_that_are_withdrawn_leave_nothing(name):
    """A cache offers and withdraws without a request, too: for what it pins, for what comes back from disk."""
    policy = make(name)
    for key in KEYS[:10]:
        policy.touch(key, 0.0)
        policy.offer(key, 0.0)
    early = size_of(policy)
    for number in range(50_000):
        policy.withdraw(KEYS[number % 10])
        policy.offer(KEYS[number % 10], number * 1e-3)
    assert size_of(policy) <= early + (1 << 20)


@pytest.mark.parametrize("blocks", [1, 50])
def test_a_remembered_block_takes_so_many_bytes(blocks):
    """Requests of one block each are the worst: every block has a cohort of its own."""
    history = 5000
    tracemalloc.start()
    try:
        model = ReuseModel(history)
        learned_nothing = tracemalloc.get_traced_memory()[0]
        for start in range(0, 3 * history, blocks):
            model.observe(Use(start * 1e-2, [number.to_bytes(32) for number in range(start, start + blocks)]))
        taken = tracemalloc.get_traced_memory()[0] - learned_nothing
    finally:
        tracemalloc.stop()
    assert taken <= history * BYTES_PER_BLOCK


def test_one_long_shared_prompt_costs_its_blocks_and_no_more():
    """A system prompt of 128 blocks before every question: its blocks are remembered once, not once per request."""
    policy = ReuseDensity()
    prompt = 128

    def ask(number: int) -> None:
        shared = [index.to_bytes(32) for index in range(prompt)]
        policy.begin(Use(number * 0.2, [*shared, (prompt + number).to_bytes(32)]))

    for number in range(200):
        ask(number)
    early = size_of(policy)
    for number in range(200, 1000):
        ask(number)
    assert size_of(policy) - early <= 800 * BYTES_PER_BLOCK + (256 << 10)
