"""The models of part B are what vLLM loads. Those that need it: `.venv-vllm/bin/python -m pytest tests/gpu`."""

import json
from pathlib import Path

import pytest

from engine.torch import tiny
from tests.gpu.models import ADDED, GEOMETRIES, WIDE_NAME, ModelWriter, written


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_a_geometry_is_one_of_a_model(name: str) -> None:
    recipe = GEOMETRIES[name]
    assert isinstance(recipe["model_type"], str)
    for layers in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if layers in recipe and "num_hidden_layers" in recipe:
            assert len(recipe[layers]) == recipe["num_hidden_layers"]
    assert name not in tiny.ARCHITECTURES, "it is written under a name of its own"


def test_what_vllm_reads_and_transformers_does_not_write_is_added(tmp_path: Path) -> None:
    path = written("kimi_linear_6_2", tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["linear_attn_config"] == ADDED["kimi_linear_6_2"]["linear_attn_config"]
    assert config["max_position_embeddings"] == tiny.CONTEXT_TOKENS
    kinds = config["layer_types"]
    assert [1 + at for at, kind in enumerate(kinds) if kind == "full_attention"] == [4, 8]


def test_a_model_for_times_has_no_weights(tmp_path: Path) -> None:
    path = written(WIDE_NAME, tmp_path)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not list(path.glob("*.safetensors"))


def test_models_are_written_beside_what_runs(tmp_path: Path) -> None:
    with ModelWriter(["llama", "no_such_model"], tmp_path) as writer:
        assert (writer.path_of("llama", 120.0) / "config.json").is_file()
        with pytest.raises(RuntimeError, match="no_such_model cannot be written: ModelError"):
            writer.path_of("no_such_model", 120.0)
        with pytest.raises(RuntimeError, match="is not written: its process ended"):
            writer.path_of("never_asked", 120.0)
