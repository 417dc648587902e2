import numpy as np
import pytest

from engine.agent.job_pages import JobKV
from engine.emulated.emulated import GROUPS, EmulatedEngine, EmulatedTimes, emulated_layout, emulated_tokens
from engine.errors import PagesInvalid
from tests.engine.builders import arena_for, greedy, job_pages, prefill, random_tokens


def no_sleep(seconds):
    raise AssertionError("nothing here takes time")


def filled(arch, length):
    engine = EmulatedEngine(emulated_layout(arch, 64), no_sleep)
    prompt, pages = random_tokens(length + 1), job_pages(emulated_layout(arch, 64), length)
    arena = arena_for(engine.layout, pages)
    prefill(engine, prompt[:-1], JobKV(engine.layout, arena, pages))
    return engine, prompt, pages, arena


@pytest.mark.parametrize("arch", sorted(GROUPS))
def test_pages_carry_what_the_next_tokens_depend_on(arch):
    for length in (1, 63, 64, 65, 300):
        engine, prompt, pages, arena = filled(arch, length)
        other = EmulatedEngine(engine.layout, no_sleep)
        tokens = greedy(other, JobKV(engine.layout, arena, pages), length, prompt[-1:], 10)
        assert tokens == emulated_tokens(prompt, 10)


@pytest.mark.parametrize("arch", sorted(GROUPS))
def test_half_landed_kv_is_noticed(arch):
    engine, _, pages, arena = filled(arch, 130)
    rng = np.random.default_rng(0)
    for group in range(len(engine.layout.groups)):
        spoilt = arena_for(engine.layout, pages)
        spoilt.data[:] = arena.data
        blocks = list(pages.states[group].values()) or [pages.blocks[group][1]]
        for segment in engine.layout.segments(group, 0, blocks[0]):
            spoilt.data[segment.start : segment.start + segment.length] = rng.integers(0, 256, segment.length)
        with pytest.raises(PagesInvalid):
            engine.load(engine.new_sequence(), JobKV(engine.layout, spoilt, pages), 130)


def test_time_is_spent_layer_by_layer():
    slept = []
    engine = EmulatedEngine(
        emulated_layout("llama", 64),
        slept.append,
        EmulatedTimes(prefill_base_s=0.4, prefill_per_token_s=0.01, decode_step_s=0.2),
    )
    sequence = engine.new_sequence()
    engine.prefill(sequence, random_tokens(100), None)
    engine.decode([sequence], [5])
    assert slept == pytest.approx([0.35] * 4 + [0.2])


def test_tokens_are_varied_and_never_special():
    tokens = emulated_tokens([5], 200)
    assert len(set(tokens)) > 100
    assert min(tokens) > 3
