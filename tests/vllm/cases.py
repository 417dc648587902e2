"""The models of the matrix. Every kind of KVCache that vLLM's CPU build computes is among them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.model import tiny as tiny
from engine.model.tiny import build_model

MAMBA2: Final = {key: value for key, value in tiny.RECIPES["granite_hybrid"].items() if key.startswith("mamba_")}
FALCON_H1: Final = {"model_type": "falcon_h1", **MAMBA2, "mamba_d_ssm": 512}  # attention beside Mamba2 in every layer


@dataclass(frozen=True)
class Case:
    """A model and how vLLM can run it on a CPU (docs/vllm.md). `native_ops`: those that PyTorch computes instead of vLLM."""

    arch: str
    prefix_caching: bool
    dtype: str = "float32"
    native_ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.arch

    def options(self, path: Path) -> dict[str, Any]:
        return {
            "model": str(path),
            "dtype": self.dtype,
            "enable_prefix_caching": self.prefix_caching,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "num_gpu_blocks_override": 512,  # enough for these prompts; several engines share one machine's memory
            "compilation_config": {"custom_ops": [f"-{op}" for op in self.native_ops]},
        }


LLAMA: Final = Case("llama", prefix_caching=True)
GRANITE: Final = Case("granite_hybrid", prefix_caching=False)
CASES: Final = (
    LLAMA,
    # vLLM's CPU kernel rotates other rows than it should where queries have a dimension of heads, as LFM2's have.
    Case("lfm2", prefix_caching=True, native_ops=("rotary_embedding",)),
    Case("gemma3", prefix_caching=True),
    GRANITE,
    Case("falcon_h1", prefix_caching=False),
    Case("qwen3_next", prefix_caching=True, dtype="bfloat16"),
)


def build(arch: str, folder: Path) -> Path:
    """A tiny model with random weights, built once."""
    path = folder / arch
    if not path.exists():
        tiny.RECIPES.setdefault("falcon_h1", FALCON_H1)
        tiny.MIXER_SCALES.setdefault("falcon_h1", {})
        build_model(arch, path, report=lambda line: None)
    return path
