"""What each device is asked: models, lengths, flags, and how long parts take at least."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.transfers import transfer_ranges
from tests.gpu.models import GEOMETRIES, WIDE_NAME

NAME: Final = "tiny"
SHM: Final = Path("/dev/shm")
LEAST_CACHE_BYTES: Final = 128 << 20
DRAIN_S: Final = 3.0
STOP_S: Final = 20.0  # to take servers down before the limit
# Where a prompt's last token and an answer's token are computed by different kernels: cut alike, they still round apart.
MAMBA: Final = "Mamba 2 computes a prompt's last token as prefill, not as decode"
OTHER_KERNELS: Final = {"nemotron_h_slice": MAMBA, "nemotron_h": MAMBA}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a device is asked. `side_by_side`: models whose servers run at the same time."""

    device: str
    models: tuple[str, ...]
    lengths: tuple[int, ...]
    timed_model: str
    timed_lengths: tuple[int, ...]
    killed_length: int
    rounds: int
    tokens: int
    timed_tokens: int
    max_model_len: int
    chunk_tokens: int | None
    flags: tuple[str, ...]
    equal_flags: tuple[str, ...] = ()
    timed_flags: tuple[str, ...] = ()
    cache_bytes: int
    side_by_side: int
    start_s: float
    limit_s: float
    needed_s: dict[str, float]

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    def flags_for(self, model: str, *, timed: bool = False) -> tuple[str, ...]:
        """vLLM's. On a GPU bf16 throughout: latent attention, FlashAttention and indexers have no fp32."""
        if self.is_dry:
            return (*self.flags, *_cpu_flags(model))
        return (*self.flags, *(self.timed_flags if timed else self.equal_flags))


CUDA: Final = Setting(
    device="cuda",
    models=tuple(GEOMETRIES),
    lengths=(300, 4096, 9000),
    timed_model=WIDE_NAME,
    timed_lengths=(2048, 8192, 30_000),
    killed_length=30_000,
    rounds=5,
    tokens=64,
    timed_tokens=128,
    max_model_len=32_768,
    chunk_tokens=None,
    flags=(
        *("--dtype", "bfloat16", "--max-num-seqs", "8", "--enable-prefix-caching"),
        # How much is free changes while servers start side by side, so none of them asks: the second flag is a check.
        *("--kv-cache-memory-bytes", str(3 << 30), "--gpu-memory-utilization", "0.1"),
        # FlashInfer's kernels would be compiled, or fetched, at the first start.
        *("--gdn-prefill-backend", "triton", "--no-enable-flashinfer-autotune"),
    ),
    equal_flags=("--enforce-eager",),  # no graphs to capture, no compiler: a start takes half as long
    timed_flags=("--load-format", "dummy"),
    cache_bytes=4 << 30,
    side_by_side=3,
    start_s=240.0,
    limit_s=570.0,
    needed_s={"B": 75.0, "C": 150.0, "D": 60.0},
)
CPU: Final = Setting(
    device="cpu",
    models=("llama", "qwen3_next", "deepseek_v3_latents", "nemotron_h"),
    lengths=(300, 1025),
    timed_model="llama",
    timed_lengths=(600,),
    killed_length=3500,
    rounds=2,
    tokens=8,
    timed_tokens=8,
    max_model_len=4096,
    chunk_tokens=512,
    flags=("--num-gpu-blocks-override", "128"),
    cache_bytes=LEAST_CACHE_BYTES,
    side_by_side=1,
    start_s=900.0,
    limit_s=7200.0,
    needed_s={},
)
# vLLM and what it loads read these. None may compile or fetch what an H100 without internet lacks.
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # servers that start side by side would write the same files
}


def why_not(setting: Setting) -> str:
    """What a device lacks for parts with servers; empty if it is there."""
    if find_spec("vllm") is None:
        return "needs vLLM"
    if setting.device == "cuda" and not torch.cuda.is_available():
        return f"needs PyTorch with CUDA and a GPU: torch {torch.__version__} sees none"
    if cache_bytes(setting) < LEAST_CACHE_BYTES:
        return f"needs {2 * setting.side_by_side * LEAST_CACHE_BYTES >> 20} MiB in {SHM}, {_free_bytes(SHM) >> 20} are free"
    return ""


def cache_bytes(setting: Setting) -> int:
    """Of a node's pages: what is wanted, and less where shared memory is small."""
    return min(setting.cache_bytes, _free_bytes(SHM) // (3 * setting.side_by_side))


def document(model: Path, setting: Setting, *, start_s: float, timed: bool = False) -> dict[str, Any]:
    """Two nodes with a server each; the PD cluster has none that prefills."""
    node: dict[str, Any] = {
        "engine": "vllm",
        "engine_args": list(setting.flags_for(model.name, timed=timed)),
        "engine_start_timeout_s": start_s,
        "max_model_len": setting.max_model_len,
        "cache_bytes": cache_bytes(setting),
        "transport": "tcp",
        "drain_timeout_s": DRAIN_S,
    }
    if setting.chunk_tokens is not None:
        node["chunk_tokens"] = setting.chunk_tokens
    return {
        "model": {"path": str(model), "name": NAME},
        "gateway": {"port": 0, "threshold_tokens": 200},
        "node": node,
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }


def lengths_at_blocks(lengths: tuple[int, ...], block: int) -> list[int]:
    """Prompts that leave one token behind a whole number of blocks: a prefix cache can cut them where two servers do."""
    return sorted({max(1, length // block) * block + 1 for length in lengths})


def length_inside(lengths: tuple[int, ...], block: int) -> int:
    """A prompt that ends inside a block."""
    return max(2, min(lengths) // block) * block + block // 2 + 1


def moved_bytes(layout: ModelLayout, length: int) -> int:
    """What of a prompt moves, by its layout."""
    return sum(size * count for size, count in transfer_ranges(layout, length - 1, 0).sizes(layout))


def _cpu_flags(model: str) -> tuple[str, ...]:
    if model == "qwen3_next":
        return ("--dtype", "bfloat16")
    native = ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}') if model.startswith("deepseek") else ()
    return ("--dtype", "float32", *native)


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
