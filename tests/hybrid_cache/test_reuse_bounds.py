"""Counts of a reuse model have a bound that no stream of requests gets past, and so has the work of one refresh."""

import random

from hybrid_cache.eviction.cohorts import MAX_COHORTS, Cohort, Cohorts
from hybrid_cache.eviction.reuse import BYTES_PER_BLOCK, MAX_CLASSES, ROWS_AT_ONCE, STATE_BYTES, ReuseModel
from tests.hybrid_cache.sizes import size_of

# Seen from the end, requests lie denser than cohorts may, at every age up to the last edge.
AGES_S = [6000 / 1.0015**step for step in range(7500)]


def test_cohorts_are_bounded_however_requests_are_spread():
    cohorts = Cohorts()
    for age in AGES_S:
        cohort = Cohort(6000 - age)
        cohort.add(0)
        cohorts.enter(cohort)
        for _ in cohorts.reached(6000 - age):
            pass
    assert MAX_COHORTS / 3 < len(cohorts) <= MAX_COHORTS


def test_counts_are_bounded_whatever_classes_there_are():
    rng, history = random.Random(0), 1000
    model = ReuseModel(history)
    for number, age in enumerate(AGES_S):
        uses = [((number, block), tuple(rng.randrange(9) for _ in range(5))) for block in range(10)]
        model.observe_classes(6000 - age, uses)
    assert size_of(model) <= STATE_BYTES + history * BYTES_PER_BLOCK


def test_a_refresh_of_many_classes_is_done_in_parts():
    model = ReuseModel(1000)
    model.observe_classes(0.0, [(number, (number,)) for number in range(2 * MAX_CLASSES)])
    parts = 1
    while not model.refresh():
        parts += 1
    assert parts == 1 + MAX_CLASSES // ROWS_AT_ONCE
