"""Workload-aware eviction compares few heads; whatever it skips, the block it takes is the one its rule names."""

import random

import pytest

from hybrid_cache.eviction.base import Use
from hybrid_cache.eviction.workload import LIFE_S, ReuseFit, WorkloadAware, reuse_priority
from tests.hybrid_cache.sizes import size_of

# Fast and slow, sure and rare, never reused, and two that are alike.
FITS = {
    f"c{i}": ReuseFit(rate, probability)
    for i, (rate, probability) in enumerate(
        [
            (1 / 10, 0.9),
            (1 / 10, 0.1),
            (1 / 500, 0.5),
            (1 / 500, 0.01),
            (2.0, 0.999),
            (0.0, 0.5),
            (1 / 60, 0.3),
            (1 / 60, 0.3),
        ]
        + [(1 / (20 + 13 * i), (i * 7 % 20 + 1) / 21) for i in range(20)]
    )
}


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_victim_has_the_lowest_priority(seed, conditional):
    rng = random.Random(seed)
    policy = WorkloadAware(fits=FITS, conditional=conditional)
    blocks: dict[int, tuple[float, str]] = {}  # offered ones: last use and category
    now = 0.0
    for step in range(3000):
        now += rng.choice([0.0, 0.0, 0.01, 0.1, 1.0, 30.0 if seed == 3 else 0.5])
        if rng.random() < 0.55 or not blocks:
            category = rng.choice(list(FITS))
            key = rng.choice(list(blocks)) if blocks and rng.random() < 0.2 else step
            policy.begin(Use(now, [key], category))
            policy.touch(key, now)
            policy.offer(key, now)
            blocks[key] = now, category
        elif rng.random() < 0.1:
            key = rng.choice(list(blocks))
            policy.withdraw(key)
            del blocks[key]
        else:
            priorities = {
                key: reuse_priority(FITS[category], now - at, LIFE_S, conditional=conditional)
                for key, (at, category) in blocks.items()
            }
            victim = policy.pop_victim(now)
            assert priorities[victim] == pytest.approx(min(priorities.values()), rel=1e-9, abs=1e-300)
            del blocks[victim]


def test_entries_of_blocks_that_come_and_go_do_not_pile_up():
    policy = WorkloadAware(fits={"c0": ReuseFit(1e-6, 0.5), "c1": ReuseFit(1.0, 0.5)})
    for key, category in enumerate(["c0", "c1"] * 2):
        policy.begin(Use(0.0, [key], category))
        policy.offer(key, 0.0)
    policy.pop_victim(1.0)
    early = size_of(policy)
    for _ in range(1000):
        policy.withdraw(2)
        policy.offer(2, 1.0)
    assert size_of(policy) < early + 1000 * 100
    assert policy.pop_victim(1.0) == 2
