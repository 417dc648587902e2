"""Tenants beside each other in one scheduler, in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.emulated.emulated import emulated_tokens
from engine.runtime.scheduler import Finished, NewToken, Prefilled
from tests.engine.builders import random_tokens
from tests.engine.runtime.scheduling import PER_TOKEN_S, STEP_S, Bench, landed
from transport.turns import LATELY_S


def test_a_light_tenant_waits_for_the_chunk_under_way_and_then_for_nobody():
    bench = Bench()
    for n in range(64):
        bench.add(f"h{n}", 1281, None, tenant="heavy")
    bench.run(5)
    came = bench.now
    bench.add("light", 513, None, tenant="light")
    bench.run(100)
    waited = bench.of("light", Prefilled)[0].ended_s - came
    assert waited <= (128 + 512) * PER_TOKEN_S + 1e-9


def test_tenants_share_prompt_tokens_by_weight():
    bench = Bench(max_running=8)
    for n in range(100):
        bench.add(f"a{n}", 1025, None, tenant="a")
        bench.add(f"b{n}", 1025, None, tenant="b", weight=3.0)
    bench.run(400)
    ended = {name: sum(bool(bench.of(f"{name}{n}", Finished)) for n in range(100)) for name in "ab"}
    assert ended["b"] == pytest.approx(3 * ended["a"], abs=4)
    assert sum(ended.values()) == pytest.approx(50, abs=2)


def test_the_prompts_of_a_tenant_keep_their_order_whoever_is_beside_them():
    def ends(beside):
        bench = Bench()
        for n, length in enumerate((900, 130, 2000, 300)):
            bench.add(f"a{n}", length, None, tenant="a")
        for n in range(beside):
            bench.add(f"b{n}", 700, None, tenant="b")
        bench.run()
        return [name for name, event in bench.log if isinstance(event, Prefilled) and name.startswith("a")]

    assert ends(0) == ends(20) == ["a1", "a3", "a0", "a2"]


def test_tokens_of_answers_count_as_served():
    bench = Bench()
    bench.add("stream", 2, 600, tenant="decodes")
    bench.run(601)
    bench.add("of it", 513, None, tenant="decodes")
    bench.add("of another", 513, None, tenant="other")
    bench.run(4)
    assert not bench.of("of it", Prefilled)
    assert bench.of("of another", Prefilled)


def test_a_tenant_alone_has_every_slot():
    bench = Bench(max_running=16)
    for n in range(20):
        bench.add(f"a{n}", 2, 1000, tenant="a")
    bench.run(40)
    assert (bench.scheduler.load.running, bench.scheduler.load.waiting) == (16, 4)


def test_slots_are_kept_for_a_tenant_that_has_been_there_lately_and_no_longer():
    bench = Bench(max_running=16)
    bench.add("once", 2, 1, tenant="light")
    bench.run()
    for n in range(20):
        bench.add(f"h{n}", 2, 100_000, tenant="heavy")
    bench.run(40)
    decoding = [n for n in range(20) if bench.of(f"h{n}", NewToken)]
    assert len(decoding) == 14
    bench.add("again", 2, 1, tenant="light")
    bench.run(2)
    assert bench.of("again", Finished)
    bench.now += LATELY_S
    bench.run(40)
    assert len([n for n in range(20) if bench.of(f"h{n}", NewToken)]) == 16


def test_the_slot_that_becomes_free_goes_to_the_tenant_with_the_least_and_in_it_to_the_first():
    bench = Bench(max_running=2)
    for n in range(6):
        bench.add(f"h{n}", 2, 20, tenant="heavy")
    bench.run(5)
    bench.add("l0", 2, 2, tenant="light")
    bench.add("l1", 2, 2, tenant="light")
    bench.run()
    begun = list(dict.fromkeys(name for name, event in bench.log if isinstance(event, NewToken)))
    assert begun[:3] == ["h0", "h1", "l0"]
    assert [name for name in begun if name.startswith("h")] == [f"h{n}" for n in range(6)]


def test_what_has_landed_is_loaded_between_the_chunks_of_whoever_has_had_less():
    bench = Bench()
    for n in range(6):
        landed(bench, f"landed{n}", 300, "heavy")
    bench.add("light", 2000, None, tenant="light")
    began = bench.now
    bench.run(8)
    assert [bool(bench.of(f"landed{n}", NewToken)) for n in range(6)] == [True] * 6
    assert bench.now - began <= 2 * 128 * PER_TOKEN_S + 8 * STEP_S + 1e-9  # every fifth round is a chunk's


def test_a_flood_of_landings_lets_a_prompt_through():
    bench = Bench()
    bench.add("light", 513, None, tenant="light")
    for n in range(40):
        landed(bench, f"landed{n}", 70, "heavy")
    bench.run(21)
    assert bench.of("light", Prefilled)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 900), st.sampled_from([None, 1, 5]), st.integers(0, 12)),
        max_size=30,
    ),
    st.integers(1, 8),
)
def test_everybody_ends_and_never_are_more_begun_than_there_are_slots(requests, slots):
    bench = Bench(max_running=slots)
    for number, (tenant, length, max_tokens, rounds) in enumerate(requests):
        bench.add(str(number), max(2, length), max_tokens, tenant=tenant)
        bench.run(rounds)
        load = bench.scheduler.load
        assert load.running <= slots
    bench.run()
    for number, (_, length, max_tokens, _) in enumerate(requests):
        assert bench.of(str(number), Finished)
        if max_tokens is not None:
            assert bench.tokens(str(number)) == emulated_tokens(random_tokens(max(2, length)), max_tokens)
    assert bench.scheduler.load.running == bench.scheduler.load.waiting == 0
