"""Models with the caches of real ones and few layers: random weights that are written, so that tokens can be compared."""

from pathlib import Path
from typing import Any, Final

from engine.torch import tiny
from tests.vllm.cases import build
from tests.vllm.recipes import RECIPES

HYBRID: Final = [*["linear_attention"] * 3, "full_attention"]
# Shapes of KVCache are those of the models named; what is beside it is small.
GEOMETRIES: Final[dict[str, dict[str, Any]]] = {
    "llama_70b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3_next_12_4": {
        **tiny.RECIPES["qwen3_next"],
        "num_hidden_layers": 16,
        "layer_types": HYBRID * 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "kimi_linear_6_2": {
        **tiny.RECIPES["kimi_linear"],
        "num_hidden_layers": 8,
        "layer_types": HYBRID * 2,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
    },
    "deepseek_v3_latents": RECIPES["deepseek_v3"],
    "nemotron_h_slice": {
        **RECIPES["nemotron_h"],
        "num_hidden_layers": 8,
        "layers_block_type": RECIPES["nemotron_h"]["layers_block_type"] * 2,
        "head_dim": 128,
        "ssm_state_size": 128,
        "n_groups": 8,
        "mamba_num_heads": 64,
    },
}
LEFT_OUT: Final = {"deepseek_v3_2": "no program at hand writes weights of a model with an indexer"}


def written(name: str, folder: Path) -> Path:
    """The directory of a model: a geometry, or a tiny one of the tests with vLLM."""
    if name not in GEOMETRIES:
        return build(name, folder)
    tiny.RECIPES.setdefault(name, GEOMETRIES[name])
    tiny.MIXER_SCALES.setdefault(name, {})
    return tiny.build_model(name, folder / name, report=lambda line: None).path
