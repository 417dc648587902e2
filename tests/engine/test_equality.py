"""Tokens decoded from KVCache that went through pages equal those of a plain transformers run."""

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.agent.job_pages import JobKV
from engine.torch.embedded import EmbeddedEngine
from engine.torch.reference import reference_tokens
from engine.torch.tiny import ARCHITECTURES
from tests.engine.builders import BLOCK, arena_for, greedy, job_pages, prefill, random_tokens

OUTPUT = 24
SMALL = (2, 3, 64, 65, 66, 130)
BORDER_BLOCKS = [k * BLOCK for k in (1, 2, 3, 4, 8, 16)]
BORDERS = [end + d for end in BORDER_BLOCKS for d in (-1, 0, 1, 2)]
FULL = (2, 3, 4, 5, *BORDERS, 700, 1500, 3000, 6000)


def handed_over(engine: EmbeddedEngine, other: EmbeddedEngine, prompt: list[int]) -> list[int]:
    """Prefill of all but the last token in one engine, decode in another, pages in between."""
    length = len(prompt) - 1
    pages = job_pages(engine.layout, length, lengths=[length // BLOCK * BLOCK] if length > BLOCK else [])
    kv = JobKV(engine.layout, arena_for(engine.layout, pages), pages)
    prefill(engine, prompt[:-1], kv)
    return greedy(other, kv, length, prompt[-1:], OUTPUT)


def continued(engine: EmbeddedEngine, prompt: list[int], cached: int) -> list[int]:
    """As above, but the prefill starts from a prefix that an earlier job left in the pages."""
    length = len(prompt) - 1
    pages = job_pages(engine.layout, length, lengths=[cached])
    arena = arena_for(engine.layout, pages)
    prefill(engine, prompt[:cached], JobKV(engine.layout, arena, pages))
    second = JobKV(engine.layout, arena, msgspec.structs.replace(pages, cached_tokens=cached))
    prefill(engine, prompt[:-1], second, start=cached)
    return greedy(engine, second, length, prompt[-1:], OUTPUT)


@pytest.mark.rotating
@pytest.mark.parametrize("length", SMALL)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decode_from_pages_equals_generate(arch, length, engine_of, model_dir):
    engine, prompt = engine_of(arch), random_tokens(length)
    other = EmbeddedEngine.load_directory(model_dir(arch), block_size=BLOCK)
    assert handed_over(engine, other, prompt) == reference_tokens(engine.model, prompt, OUTPUT)


@pytest.mark.rotating("more")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prefill_from_a_cached_prefix_equals_generate(arch, engine_of):
    engine, prompt = engine_of(arch), random_tokens(3 * BLOCK + 5)
    expected = reference_tokens(engine.model, prompt, OUTPUT)
    for cached in (BLOCK, 3 * BLOCK):
        assert continued(engine, prompt, cached) == expected, cached


@pytest.mark.rotating("more")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_output_is_not_degenerate(arch, engine_of):
    for length in (5, 40, 200):
        assert len(set(reference_tokens(engine_of(arch).model, random_tokens(length), 32))) > 5


@pytest.mark.rotating("more")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_wrong_pages_give_other_tokens(arch, engine_of):
    """The outputs depend on every kind of page: else the tests above would prove nothing."""
    engine, prompt = engine_of(arch), random_tokens(130)
    pages = job_pages(engine.layout, 129)
    clean = arena_for(engine.layout, pages)
    prefill(engine, prompt[:-1], JobKV(engine.layout, clean, pages))
    expected = greedy(engine, JobKV(engine.layout, clean, pages), 129, prompt[-1:], OUTPUT)
    for group in range(len(engine.layout.groups)):
        spoilt = arena_for(engine.layout, pages)
        spoilt.data[:] = clean.data
        victim = pages.states[group][129] if pages.states[group] else pages.blocks[group][1]
        for segment in engine.layout.segments(group, 0, victim):
            spoilt.data[segment.start : segment.start + segment.length] = 0
        assert greedy(engine, JobKV(engine.layout, spoilt, pages), 129, prompt[-1:], OUTPUT) != expected, group


def _with_border(length: int) -> object:
    """A sample covers where prompts end, as seen from a block border, not each length with each architecture."""
    border = min((length - end for end in BORDER_BLOCKS), key=abs)
    near = border if border in (-1, 0, 1, 2) else "none"
    return pytest.param(length, marks=pytest.mark.dimensions(length=None, near=near))


@pytest.mark.slow
@pytest.mark.parametrize("length", [_with_border(length) for length in FULL])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_full_matrix(arch, length, engine_of, model_dir):
    engine, prompt = engine_of(arch), random_tokens(length, seed=1)
    expected = reference_tokens(engine.model, prompt, OUTPUT)
    other = EmbeddedEngine.load_directory(model_dir(arch), block_size=BLOCK)
    assert handed_over(engine, other, prompt) == expected
    for cached in {BLOCK, (length - 1) // 2 // BLOCK * BLOCK, (length - 1) // BLOCK * BLOCK}:
        if 0 < cached < length:
            assert continued(engine, prompt, cached) == expected, cached


def test_layers_that_are_in_two_groups(tmp_path):
    """Falcon-H1: every layer has attention and a state."""
    config = AutoConfig.for_model(
        "falcon_h1",
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=256,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_chunk_size=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    engine = EmbeddedEngine.load_directory(tmp_path, block_size=BLOCK)
    assert [group.layers for group in engine.layout.groups] == [(0, 1), (0, 1)]
    for length in (2, 66):
        prompt = random_tokens(length)
        assert handed_over(engine, engine, prompt) == reference_tokens(engine.model, prompt, OUTPUT), length
    assert continued(engine, prompt, BLOCK) == reference_tokens(engine.model, prompt, OUTPUT)
