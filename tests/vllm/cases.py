"""The models of the matrix. Every kind of KVCache that vLLM's CPU build computes is among them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.torch import tiny
from engine.torch.tiny import build_model
from tests.vllm.recipes import RECIPES, SCALES


@dataclass(frozen=True)
class Case:
    """A model and how vLLM can run it on a CPU. `native_ops`: those that PyTorch computes instead of vLLM.

    `models` has layers of that kind, which is `layers`; `note` is why it is run so. They are docs/guides/vllm.md's table.
    """

    arch: str
    models: str
    layers: str
    prefix_caching: bool
    dtype: str = "float32"
    native_ops: tuple[str, ...] = ()
    note: str = ""

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

    @property
    def flags(self) -> str:
        """What a node's command line has for it after `--`."""
        compilation = json.dumps({"custom_ops": [f"-{op}" for op in self.native_ops]})
        return " ".join(
            [
                *(["--dtype bfloat16"] if self.dtype == "bfloat16" else []),
                *([] if self.prefix_caching else ["--no-enable-prefix-caching"]),
                *([f"--compilation-config '{compilation}'"] if self.native_ops else []),
            ]
        )


LLAMA: Final = Case("llama", "Llama, Qwen3 and other dense ones", "full attention", prefix_caching=True)
NO_SCAN: Final = "the CPU scan of plain vLLM fails with prefix caching; with the connector it does not"
GRANITE: Final = Case(
    "granite_hybrid", "Granite 4 hybrid", "Mamba 2, full attention", prefix_caching=False, note=NO_SCAN
)
ROTARY: Final = ("rotary_embedding",)
CASES: Final = (
    LLAMA,
    Case(
        "lfm2",
        "LFM2",
        "short convolutions, full attention",
        prefix_caching=True,
        native_ops=ROTARY,
        note="else vLLM's CPU kernel rotates a part of the queries and keys, which part depends on what else is in the batch",
    ),
    Case("gemma3", "Gemma 3, Mistral with a window", "sliding window, full attention", prefix_caching=True),
    GRANITE,
    Case("falcon_h1", "Falcon H1", "Mamba 2 and full attention in each", prefix_caching=False, note=NO_SCAN),
    Case(
        "qwen3_next",
        "Qwen3-Next",
        "gated delta net, full attention",
        prefix_caching=True,
        dtype="bfloat16",
        note="vLLM's CPU kernel wants it",
    ),
    Case("cohere2", "Command A and R7B", "sliding window, full attention without positions", prefix_caching=True),
    Case("olmo3", "OLMo 3", "sliding window, full attention", prefix_caching=True),
    Case("zamba2", "Zamba 2", "Mamba 2, attention shared by layers", prefix_caching=False, note=NO_SCAN),
    Case("nemotron_h", "Nemotron H", "Mamba 2, full attention, none", prefix_caching=False, note=NO_SCAN),
    Case(
        "deepseek_v3",
        "DeepSeek V2, V3 and R1, Kimi K2",
        "multi-head latent attention",
        prefix_caching=True,
        native_ops=ROTARY,
        note="as LFM2: without, plain vLLM gave other tokens for 15 of 42 prompts in one batch than alone",
    ),
    Case("gpt_oss", "gpt-oss", "sliding window, full attention, both with sinks", prefix_caching=True),
    Case(
        "gemma4",
        "Gemma 4",
        "sliding window, full attention with larger heads",
        prefix_caching=True,
    ),
)


def table() -> str:
    """The models that are tested, as Markdown."""
    rows = [("models", "layers", "flags with the CPU build, after `--`", "why"), ("---", "---", "---", "---")]
    rows += [(case.models, case.layers, f"`{case.flags}`" if case.flags else "", case.note) for case in CASES]
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows)


def build(arch: str, folder: Path) -> Path:
    """A tiny model with random weights, built once."""
    path = folder / arch
    if not path.exists():
        if arch in RECIPES:
            tiny.RECIPES.setdefault(arch, RECIPES[arch])
            tiny.MIXER_SCALES.setdefault(arch, SCALES.get(arch, {}))
        build_model(arch, path, report=lambda line: None)
    return path


if __name__ == "__main__":
    print(table())
