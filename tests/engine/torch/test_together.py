"""Sequences that decode together have the logits, bit by bit, that each has alone."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from engine.torch.embedded import EmbeddedEngine
from engine.torch.tiny import ARCHITECTURES
from tests.engine.builders import BLOCK, random_tokens

LENGTHS = [2, 3, 127, 128, 129, 5, 64, 65, 300, 7, 31, 100, 12, 250, 90, 17]  # gemma3's window is 128


def primed(engine, length, seed):
    prompt = random_tokens(length, seed)
    sequence = engine.new_sequence(length)
    if length > 1:
        engine.prefill(sequence, prompt[:-1], None)
    return sequence, prompt[-1]


class Pair:
    """The same sequence twice: one decodes alone, one in batches."""

    def __init__(self, engine, length, seed=0):
        self.engine = engine
        (self.alone, self.token), (self.batched, _) = primed(engine, length, seed), primed(engine, length, seed)


def step(engine, pairs):
    expected = [engine.decode([pair.alone], [pair.token])[0] for pair in pairs]
    logits = engine.decode([pair.batched for pair in pairs], [pair.token for pair in pairs])
    np.testing.assert_array_equal(logits, expected)
    for pair, row in zip(pairs, expected, strict=True):
        pair.token = int(row.argmax())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_decodes_together(arch, engine_of):
    assert engine_of(arch).alone_because is None


@pytest.mark.rotating("bits")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_batch_changes_no_bit(arch, engine_of):
    engine = engine_of(arch)
    pairs = [Pair(engine, length, seed) for seed, length in enumerate(LENGTHS)]
    for _ in range(6):
        step(engine, pairs)


@pytest.mark.rotating("bits")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sequences_come_and_go(arch, engine_of):
    engine = engine_of(arch)
    first, second, third, short = (Pair(engine, length) for length in (40, 9, 70, 1))
    for pairs in ([first, second], [second, first], [first, second, third], [third], [first], [third, first], [short]):
        for _ in range(2):
            step(engine, pairs)
    fresh = Pair(engine, 1)  # nothing of it has been computed: the whole step goes one by one
    step(engine, [first, fresh, third])
    step(engine, [fresh, short, third, second])


@pytest.mark.rotating("bits")
@pytest.mark.parametrize("arch", ["qwen3_next", "gemma3"])
def test_what_an_answer_leaves_behind_does_not_depend_on_the_batch(arch, engine_of):
    engine = engine_of(arch)
    pairs = [Pair(engine, length) for length in (BLOCK + 3, 60, 30)]
    for sequence in itertools.chain(*((pair.alone, pair.batched) for pair in pairs)):
        engine.begin_answer(sequence)
    for _ in range(BLOCK):
        step(engine, pairs)
    for pair in pairs:
        alone, batched = pair.alone.marks, pair.batched.marks
        assert alone.num_tokens == batched.num_tokens > 0
        for number, states in alone.states.items():
            assert all(map(torch.equal, states, batched.states[number]))
        for number, rows in alone.attention(0).items():
            assert torch.equal(rows.keys, batched.attention(0)[number].keys)
            assert torch.equal(rows.values, batched.attention(0)[number].values)


def test_layers_with_attention_and_a_state():
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
    engine = EmbeddedEngine(AutoModelForCausalLM.from_config(config, dtype=torch.float32), identity="m", block_size=64)
    assert engine.alone_because is None
    pairs = [Pair(engine, length) for length in (5, 70, 33)]
    for _ in range(4):
        step(engine, pairs)


def tiny_llama(model_class):
    config = AutoConfig.for_model(
        "llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
    )
    torch.manual_seed(0)
    return EmbeddedEngine(model_class(config), identity="m", block_size=64)


def test_projections_with_a_bias():
    engine = tiny_llama(LlamaForCausalLM)
    assert engine.alone_because is None
    pairs = [Pair(engine, length) for length in (5, 70, 33)]
    for _ in range(4):
        step(engine, pairs)


class OneAtATime(LlamaForCausalLM):
    def forward(self, input_ids, **kwargs):
        if len(input_ids) > 1:
            raise ValueError("one sequence, please")
        return super().forward(input_ids, **kwargs)


class Leaking(LlamaForCausalLM):
    """Its logits depend on who else is there."""

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits += len(input_ids)
        return output


@pytest.mark.parametrize(
    ("model_class", "reason"), [(OneAtATime, "one sequence, please"), (Leaking, "would depend on the batch")]
)
def test_a_model_that_cannot_is_decoded_one_by_one(model_class, reason):
    engine = tiny_llama(model_class)
    assert reason in engine.alone_because
    pairs = [Pair(engine, length) for length in (5, 70, 33)]
    step(engine, pairs)
