"""Sequences that change each other's tokens: models whose code keeps them in mind."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import ModelError
from engine.staged.share import LayerShare, load_share, shares
from engine.torch.apart import are_apart
from engine.torch.embedded import EmbeddedEngine


def sums(remembered):
    """A model that comes to the sum of what its sequence has been fed, as `remembered` has it."""

    def feed(sequence, kind, num_tokens):
        key = remembered(sequence)
        totals[key] = totals.get(key, 0) + kind * num_tokens
        return torch.tensor(totals[key])

    totals = {}
    numbers = iter(range(100))
    return lambda: next(numbers), feed


def test_what_is_remembered_by_sequence_changes_no_other():
    assert are_apart(*sums(lambda sequence: sequence))
    assert not are_apart(*sums(lambda sequence: "everybody's"))


@pytest.fixture
def recurrent_gemma(tmp_path):
    """Its recurrent layers keep the last sequence's state as an attribute."""
    config = AutoConfig.for_model(
        "recurrent_gemma", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, lru_width=64, attention_window_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_that_remembers_outside_of_its_cache_is_refused(recurrent_gemma):
    with pytest.raises(ModelError, match="recurrent_gemma keeps state outside of its cache"):
        EmbeddedEngine.load_directory(recurrent_gemma, block_size=16)


def test_so_is_its_share_of_layers(recurrent_gemma):
    first = shares(3, 2)[0]
    with pytest.raises(ModelError, match="recurrent_gemma keeps state outside of its cache"):
        LayerShare(load_share(recurrent_gemma, first), first, identity="m", block_size=16)
