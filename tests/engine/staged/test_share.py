"""What shares of a model compute one after the other has the bits of what the whole model computes."""

import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.agent.job_pages import JobKV
from engine.errors import ModelError
from engine.staged.share import LayerShare, load_share, shares
from engine.torch.embedded import EmbeddedEngine
from engine.torch.tiny import ARCHITECTURES
from tests.engine.builders import BLOCK, arena_for, job_pages, prefill, random_tokens

SPLITS = (
    [range(2), range(2, 4)],
    [range(1), range(1, 4)],
    [range(3), range(3, 4)],
    [range(1), range(1, 3), range(3, 4)],
)
CASES = ((2, 1), (BLOCK, 64), (2 * BLOCK + 1, 100), (5 * BLOCK - 1, 2 * BLOCK))  # tokens, chunk


def cut_up(directory, split, block_size=BLOCK):
    return [LayerShare(load_share(directory, part), part, identity="m", block_size=block_size) for part in split]


class Staged:
    """Shares in a row, as an engine's prefill and decode see them."""

    def __init__(self, parts, layout):
        self.parts, self.layout = parts, layout

    def new_sequence(self, expected):
        return _Row([part.new_sequence(expected) for part in self.parts])

    def load(self, sequence, kv, num_tokens):
        for part, each in zip(self.parts, sequence.each, strict=True):
            part.load(each, kv, num_tokens)

    def prefill(self, sequence, tokens, kv):
        chunk = tokens
        for part, each in zip(self.parts, sequence.each, strict=True):
            chunk = part.prefill(each, chunk, len(tokens), kv)
        assert chunk is None

    def decode(self, sequences, tokens):
        (sequence,), chunk = sequences, tokens
        for part, each in zip(self.parts, sequence.each, strict=True):
            chunk = part.decode(each, chunk)
        return [chunk.numpy()]


class _Row:
    def __init__(self, each):
        self.each = each

    @property
    def num_tokens(self):
        return self.each[0].num_tokens


def pages_of(engine, tokens, chunk, cached=0):
    """What a prefill leaves in pages, computed from the start or on top of what a first prefill has left, and a next token."""
    lengths = [len(tokens) // BLOCK * BLOCK] if len(tokens) > BLOCK else []
    pages = job_pages(engine.layout, len(tokens), lengths=lengths)
    arena = arena_for(engine.layout, pages)
    if cached:
        prefill(engine, tokens[:cached], JobKV(engine.layout, arena, pages), chunk=chunk)
    sequence = engine.new_sequence(len(tokens))
    kv = JobKV(engine.layout, arena, pages)
    if cached:
        engine.load(sequence, kv, cached)
    while sequence.num_tokens < len(tokens):
        here = sequence.num_tokens
        stop = min([len(tokens), here + chunk, *(length for length in kv.snapshot_lengths if length > here)])
        engine.prefill(sequence, tokens[here:stop], kv)
    return arena.data, engine.decode([sequence], [7])[0]


def compare(whole, staged, cases=CASES):
    for length, chunk in cases:
        tokens = random_tokens(length)
        for cached in {0, (length - 1) // BLOCK * BLOCK}:
            expected, logits = pages_of(whole, tokens, chunk, cached)
            found, staged_logits = pages_of(staged, tokens, chunk, cached)
            assert np.array_equal(expected, found), (length, chunk, cached)
            assert np.array_equal(logits, staged_logits), (length, chunk, cached)


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_pages_and_logits_of_stages_have_the_bits_of_the_whole_model(arch, split, case, engine_of, model_dir):
    whole = engine_of(arch)
    compare(whole, Staged(cut_up(model_dir(arch), split), whole.layout), [case])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_share_holds_the_weights_of_its_layers_alone(arch, engine_of, model_dir):
    whole = engine_of(arch).model
    parts = [load_share(model_dir(arch), part) for part in shares(4, 3)]
    norm = sum(each.numel() for name, each in whole.named_parameters() if "norm" in name and "layers" not in name)
    total = sum(each.numel() for part in parts for each in part.parameters())
    assert total == sum(each.numel() for each in whole.parameters()) + 2 * norm
    own = dict(whole.named_parameters())
    assert all(torch.equal(each, own[name]) for part in parts for name, each in part.named_parameters())


def built(tmp_path, kind, **changes):
    config = AutoConfig.for_model(
        kind, vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path, EmbeddedEngine.load_directory(tmp_path, block_size=BLOCK)


def test_models_whose_embedding_is_their_head(tmp_path):
    directory, whole = built(tmp_path, "llama", tie_word_embeddings=True)
    compare(whole, Staged(cut_up(directory, shares(3, 3)), whole.layout))


def test_embeddings_that_are_scaled(tmp_path):
    directory, whole = built(
        tmp_path, "granitemoehybrid", shared_intermediate_size=256, num_local_experts=0, num_experts_per_tok=0,
        layer_types=["mamba", "attention", "mamba"], mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1,
        mamba_d_state=32, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=64, embedding_multiplier=12.0, logits_scaling=8.0,
    )  # fmt: skip
    compare(whole, Staged(cut_up(directory, shares(3, 2)), whole.layout))


def test_layers_that_have_attention_and_a_state_and_return_tuples(tmp_path):
    directory, whole = built(
        tmp_path, "falcon_h1", mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=32,
        mamba_d_conv=4, mamba_chunk_size=64,
    )  # fmt: skip
    compare(whole, Staged(cut_up(directory, shares(3, 2)), whole.layout))


def test_layers_that_look_at_embeddings_beside_what_the_layer_before_made_are_refused(tmp_path):
    directory, _ = built(
        tmp_path, "zamba2", mamba_d_state=16, mamba_ngroups=1, mamba_headdim=32, n_mamba_heads=8, mamba_expand=2,
        num_mem_blocks=1, chunk_size=64, layers_block_type=["mamba", "hybrid", "hybrid"],
        layer_types=["linear_attention", "hybrid", "hybrid"],
    )  # fmt: skip
    for part in shares(3, 2):
        model = load_share(directory, part)
        if part.start:
            with pytest.raises(ModelError, match="zamba2 cannot be shared out among stages: they use embeddings"):
                LayerShare(model, part, identity="m", block_size=BLOCK)


def test_a_share_without_any_kvcache_is_refused(tmp_path):
    directory, _ = built(
        tmp_path, "nemotron_h", hybrid_override_pattern="M*-", mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16,
        n_groups=1, head_dim=32, chunk_size=64,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"layers range\(2, 3\) keep no KVCache: choose fewer stages"):
        cut_up(directory, shares(3, 3))


def test_weights_that_cannot_be_read_are_a_models_error(model_dir, tmp_path):
    shutil.copytree(model_dir("llama"), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    for load in (lambda: load_share(tmp_path, range(2)), lambda: EmbeddedEngine.load_directory(tmp_path)):
        with pytest.raises(ModelError, match="cannot be loaded"):
            load()


def test_weights_that_are_missing_are_a_models_error(model_dir, tmp_path):
    shutil.copytree(model_dir("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_share(tmp_path, range(2, 4))  # which has all of its own
    for load in (lambda: load_share(tmp_path, range(2)), lambda: EmbeddedEngine.load_directory(tmp_path)):
        with pytest.raises(ModelError, match=r"weights are missing: model.layers.1.self_attn.o_proj.weight"):
            load()


def test_layers_are_shared_out_evenly():
    assert shares(4, 2) == (range(2), range(2, 4))
    assert shares(7, 3) == (range(3), range(3, 5), range(5, 7))
    with pytest.raises(ModelError, match="5 stages for a model of 4 layers"):
        shares(4, 5)
