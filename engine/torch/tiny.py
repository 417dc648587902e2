"""Tiny hybrid models with seeded random weights, built offline: real architectures, real cache shapes, no download.

Sizes are chosen so that a CPU core prefills thousands of tokens per second. Random weights need care to be of any use:

- Matrices are scaled up by `WEIGHT_SCALE`: plain initialisation leaves logits almost flat.
- Input and output embeddings are not tied: tied ones make a random model repeat its last token.
- `MIXER_SCALES` make attention and states matter as much as the MLPs: else a model with the wrong KVCache would
  still choose the right tokens, and comparing tokens would prove nothing.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from engine.byte_tokenizer import BOS, EOS, PAD, VOCAB_SIZE, save_byte_tokenizer
from engine.errors import ModelError

log = logging.getLogger(__name__)

CONFIG_FILE: Final = "config.json"
MARKER_FILE: Final = "prfaas_tiny_model.json"  # says which recipe and seed made the directory
CONTEXT_TOKENS: Final = 32768
WEIGHT_SCALE: Final = 3.0

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "max_position_embeddings": CONTEXT_TOKENS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_LINEAR_TO_FULL: Final = ["linear_attention"] * 3 + ["full_attention"]

# What each architecture adds to _COMMON. `model_type` is the name transformers knows it by.
RECIPES: Final[dict[str, dict[str, Any]]] = {
    "kimi_linear": {  # KDA : MLA = 3 : 1, as Kimi Linear
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 128,
        "num_shared_experts": 1,
        "linear_head_dim": 64,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "layer_types": _LINEAR_TO_FULL,
    },
    "qwen3_next": {  # gated delta net : full attention = 3 : 1
        "model_type": "qwen3_next",
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "layer_types": _LINEAR_TO_FULL,
    },
    "granite_hybrid": {  # Mamba2 : full attention = 3 : 1
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 512,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["mamba"] * 3 + ["attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "position_embedding_type": "nope",
    },
    "lfm2": {  # short convolutions, which have no recurrent state; vLLM reads block_dim, conv_dim and conv_bias
        "model_type": "lfm2",
        "conv_L_cache": 3,
        "block_dim": 256,
        "conv_dim": 256,
        "conv_bias": False,
        "block_multiple_of": 64,
        "layer_types": ["conv"] * 3 + ["full_attention"],
    },
    "gemma3": {  # sliding window : full attention = 3 : 1
        "model_type": "gemma3_text",
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "llama": {"model_type": "llama"},  # full attention only
}
ARCHITECTURES: Final = tuple(RECIPES)


# Further factors by end of parameter name, found by spoiling pages one by one and looking at the logits.
MIXER_SCALES: Final[dict[str, dict[str, float]]] = {
    "kimi_linear": {"self_attn.o_proj.weight": 5.0, "layers.3.self_attn.q_proj.weight": 2.0},
    "qwen3_next": {"linear_attn.out_proj.weight": 2.0, "self_attn.o_proj.weight": 4.0},
    "granite_hybrid": {f"self_attn.{part}_proj.weight": 2.0 for part in "qko"},
    "lfm2": {"conv.conv.weight": 30.0, "self_attn.q_proj.weight": 2.0, "self_attn.out_proj.weight": 4.0},
    "gemma3": {},
    "llama": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    arch: str
    path: Path
    num_parameters: int
    num_layers: int
    vocab_size: int
    context_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.arch}: {self.num_parameters / 1e6:.1f}M parameters, {self.num_layers} layers, "
            f"vocabulary {self.vocab_size}, context {self.context_tokens} tokens -> {self.path}"
        )


def build_model(
    arch: str,
    out_dir: str | Path,
    seed: int = 0,
    *,
    overwrite: bool = False,
    report: Callable[[str], None] = print,
    save_tokenizer: Callable[[Path, int], None] = save_byte_tokenizer,
) -> BuiltModel:
    """Builds a tiny model of `arch` in `out_dir` and reports what it made.

    Equal seeds give equal weights. Interrupted, it leaves nothing that looks like a model. A directory that holds anything but
    this very model is left alone unless `overwrite`.
    Raises ModelError.
    """
    recipe = dict(recipe_of(arch))
    out = Path(out_dir)
    marker = {"arch": arch, "seed": seed}
    _check_destination(out, marker, overwrite)
    from safetensors import SafetensorError

    model = _seeded_model(recipe, MIXER_SCALES[arch], seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as unfinished:
            model.save_pretrained(unfinished)
            save_tokenizer(Path(unfinished), CONTEXT_TOKENS)
            (Path(unfinished) / MARKER_FILE).write_text(json.dumps(marker))
            _move(Path(unfinished), out)
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{out} cannot be written: {getattr(exc, 'strerror', None) or exc}") from exc
    built = BuiltModel(
        arch=arch,
        path=out,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layers=model.config.num_hidden_layers,
        vocab_size=VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
    )
    report(str(built))
    return built


def recipe_of(arch: str) -> dict[str, Any]:
    """What its config.json says. Raises ModelError for an architecture that is not known."""
    try:
        return {**_COMMON, **RECIPES[arch]}
    except KeyError:
        raise ModelError(f"unknown architecture {arch!r}: choose one of {', '.join(ARCHITECTURES)}") from None


def _check_destination(out: Path, marker: dict[str, Any], overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ModelError(f"{out} is a file, not a directory")
    if overwrite or not out.exists() or not any(out.iterdir()):
        return
    # Real weights must not be replaced by noise because a path was mistyped.
    if not _is_of(out / MARKER_FILE, marker):
        raise ModelError(f"{out} holds something else: name another directory, or overwrite it with --overwrite")


def _move(unfinished: Path, out: Path) -> None:
    """All files. Raises OSError."""
    for name in moved_in_order(path.name for path in unfinished.iterdir()):
        (unfinished / name).replace(out / name)


def moved_in_order(names: Iterable[str]) -> list[str]:
    """What a model is of first, and last the file by which a directory counts as a model: interrupted, it is built again."""
    return [MARKER_FILE, *(name for name in names if name not in (MARKER_FILE, CONFIG_FILE)), CONFIG_FILE]


def _is_of(marker: Path, expected: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(marker.read_text()) == expected)
    except (OSError, ValueError):
        return False


def _seeded_model(recipe: dict[str, Any], mixer_scales: dict[str, float], seed: int) -> Any:
    import torch
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    config = transformers.AutoConfig.for_model(recipe.pop("model_type"), **recipe)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Convolutions and decay rates keep their own ranges: scaled, states would explode or forget at once.
            if parameter.dim() >= 2 and not name.endswith(("conv.weight", "conv1d.weight", "A_log")):
                parameter.mul_(WEIGHT_SCALE)
            for ending, scale in mixer_scales.items():
                if name.endswith(ending):
                    parameter.mul_(scale)
    return model.eval()
