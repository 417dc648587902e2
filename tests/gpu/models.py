"""Models with the caches of real ones and few layers: random weights that are written, so that tokens can be compared.

`python -m tests.gpu.models FOLDER NAME ...` writes them one after the other, and what failed into NAME.failed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from engine.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from engine.torch import tiny
from tests.vllm.cases import build
from tests.vllm.recipes import RECIPES, SCALES

POLL_S: Final = 0.1
HYBRID: Final = [*["linear_attention"] * 3, "full_attention"]
# What vLLM's kernels of latent attention take on a GPU: heads of 128 + 64 and of 128, a latent of 512 + 64.
LATENT: Final[dict[str, Any]] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# As many groups, and experts of a token, as DeepSeek V3 has: the kernel that chooses experts is made for them.
GROUPED_EXPERTS: Final[dict[str, Any]] = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# Shapes of KVCache are those of the models named; what is beside it is small. The most telling ones come first.
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
        "num_attention_heads": 16,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "deepseek_v3_2": {
        "model_type": "deepseek_v32",
        **LATENT,
        **GROUPED_EXPERTS,
        "q_lora_rank": 256,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "kimi_linear_6_2": {
        **tiny.RECIPES["kimi_linear"],
        **LATENT,
        "num_hidden_layers": 8,
        "layer_types": HYBRID * 2,
        # transformers writes a dense layer under the name of a mixture, where vLLM does not look for it.
        "mlp_layer_types": ["sparse"] * 8,
        "num_experts": 64,
        "num_experts_per_token": 8,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
    },
    "nemotron_h_slice": {
        **RECIPES["nemotron_h"],
        "num_hidden_layers": 8,
        "layers_block_type": RECIPES["nemotron_h"]["layers_block_type"] * 2,
        "head_dim": 128,
        "ssm_state_size": 128,
        "n_groups": 8,
        "mamba_num_heads": 64,
        "chunk_size": 128,
    },
    "deepseek_v3_latents": {**RECIPES["deepseek_v3"], **LATENT, **GROUPED_EXPERTS, "q_lora_rank": 256},
}
LATENT_SCALES: Final = {"self_attn.o_proj.weight": 5.0, "self_attn.q_b_proj.weight": 2.0}
# So that answers follow from what attention and states hold, as with the tiny models that these are made of.
MIXER_SCALES: Final[dict[str, dict[str, float]]] = {
    "qwen3_next_12_4": tiny.MIXER_SCALES["qwen3_next"],
    "kimi_linear_6_2": tiny.MIXER_SCALES["kimi_linear"],
    "nemotron_h_slice": SCALES["nemotron_h"],
    "deepseek_v3_2": LATENT_SCALES,
    "deepseek_v3_latents": LATENT_SCALES,
}
# What vLLM reads in config.json and transformers does not write. Without the first two, a mixture has no place for the
# bias by which DeepSeek chooses experts, and loading ends with a KeyError.
ADDED: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3_2": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v3_latents": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "kimi_linear_6_2": {
        "max_position_embeddings": tiny.CONTEXT_TOKENS,
        "mla_use_nope": True,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
        },
    },
}
# Layers as wide as those of Llama 3 70B, so that prefill takes as long for its KVCache as there. No weights: for times.
WIDE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": tiny.CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"],
}
WIDE_NAME: Final = "llama_70b_wide"


def written(name: str, folder: Path) -> Path:
    """The directory of a model: a geometry, or a tiny one of the tests with vLLM."""
    if name == WIDE_NAME:
        return _without_weights(folder / name)
    if name not in GEOMETRIES:
        return build(name, folder)
    tiny.RECIPES.setdefault(name, GEOMETRIES[name])
    tiny.MIXER_SCALES.setdefault(name, MIXER_SCALES.get(name, {}))
    path = tiny.build_model(name, folder / name, report=lambda line: None).path
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | ADDED.get(name, {}), indent=1))
    return path


def _without_weights(path: Path) -> Path:
    from transformers import AutoConfig

    AutoConfig.for_model("llama", **WIDE).save_pretrained(path)
    save_byte_tokenizer(path, tiny.CONTEXT_TOKENS)
    return path


class ModelWriter:
    """A process that writes models while others are served."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.models", str(folder), *names], stdout=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def path_of(self, name: str, limit_s: float) -> Path:
        """Waits for a model. Raises RuntimeError when it is not written in time, or cannot be."""
        path, failed = self._folder / name, self._folder / f"{name}.failed"
        deadline = time.monotonic() + limit_s
        while not path.exists():
            if failed.exists():
                raise RuntimeError(f"{name} cannot be written: {failed.read_text()}")
            if self._process.poll() is not None and not path.exists():
                raise RuntimeError(f"{name} is not written: its process ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} is not written after {limit_s:.0f} s")
            time.sleep(POLL_S)
        return path


def write_all(folder: Path, names: Sequence[str]) -> None:
    """Each model appears whole or not at all."""
    unfinished = folder / "unfinished"
    for name in names:
        try:
            written(name, unfinished).rename(folder / name)
        except Exception as error:  # of transformers or of safetensors: the other models are not concerned
            (folder / f"{name}.failed").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), sys.argv[2:])
