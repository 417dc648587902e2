"""The models of parts B and C: what is written, and how."""

import json
from pathlib import Path

import pytest

from engine.torch import tiny
from tests.gpu.models import ADDED, GEOMETRIES, WIDE_NAME, ModelWriter, write_all, written

WRITE_S = 120.0


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_a_geometry_is_one_of_a_model(name: str) -> None:
    recipe = GEOMETRIES[name]
    assert isinstance(recipe["model_type"], str)
    for layers in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if layers in recipe and "num_hidden_layers" in recipe:
            assert len(recipe[layers]) == recipe["num_hidden_layers"]
    assert name not in tiny.ARCHITECTURES, "it is written under a name of its own"


def test_what_vllm_reads_and_transformers_does_not_write_is_added() -> None:
    kinds = GEOMETRIES["kimi_linear_6_2"]["layer_types"]
    linear = ADDED["kimi_linear_6_2"]["linear_attn_config"]
    for name, kind in (("full_attn_layers", "full_attention"), ("kda_layers", "linear_attention")):
        assert linear[name] == [1 + at for at, each in enumerate(kinds) if each == kind]
    assert linear["head_dim"] == GEOMETRIES["kimi_linear_6_2"]["linear_head_dim"]


@pytest.mark.parametrize("name", [name for name, recipe in GEOMETRIES.items() if "n_group" in recipe])
def test_a_mixture_says_by_which_bias_it_chooses(name: str) -> None:
    assert ADDED[name]["topk_method"] == "noaux_tc"


def test_a_mixture_of_kimi_is_one_in_every_layer() -> None:
    assert set(GEOMETRIES["kimi_linear_6_2"]["mlp_layer_types"]) == {"sparse"}


def test_a_model_for_times_has_no_weights(tmp_path: Path) -> None:
    path = written(WIDE_NAME, tmp_path)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not list(path.glob("*.safetensors"))


def test_a_model_appears_whole_or_its_failure_does(tmp_path: Path) -> None:
    write_all(tmp_path, [WIDE_NAME, "no_such_model"])
    with ModelWriter([], tmp_path) as writer:
        assert (writer.path_of(WIDE_NAME, WRITE_S) / "config.json").is_file()
        with pytest.raises(RuntimeError, match="no_such_model cannot be written: ModelError"):
            writer.path_of("no_such_model", WRITE_S)
        with pytest.raises(RuntimeError, match="never_asked is not written"):
            writer.path_of("never_asked", 0.0)
