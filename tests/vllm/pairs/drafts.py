"""Tiny drafts with random weights for the tiny models: heads in EAGLE's two forms, and layers that predict several tokens.

None of them is right more often than chance. What a draft proposes follows from all that its cache holds all the same, so equal
proposals tell that the caches are equal.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from engine.torch.tiny import recipe_of
from tests.vllm.cases import build

TOKENS: Final = 3  # that a draft proposes
SCALE: Final = 4.0
MODEL: Final = "model.safetensors"


def drafts(method: str, arch: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A target and its speculative configuration."""
    target = build(arch, folder)
    common = {"method": method, "num_speculative_tokens": TOKENS}
    match method:
        case "ngram":
            return target, common | {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        case "draft_model":
            return target, common | {"model": str(target)}
        case "eagle" | "eagle3":
            return target, common | {"model": str(_head(method, folder))}
        case _:
            add = _next_predictor if arch == "qwen3_next" else _predictor
            return _with_predictor(target, folder, add), common


def _head(method: str, folder: Path) -> Path:
    """A layer of Llama that takes the target's hidden states."""
    import torch
    from safetensors.torch import save_file

    path = folder / method
    if path.exists():
        return path
    recipe = recipe_of("llama")
    hidden, inner, vocabulary = (recipe[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // recipe["num_attention_heads"] * recipe["num_key_value_heads"]
    layer, inputs, combined = ("layers.0", hidden, 2) if method == "eagle" else ("midlayer", 2 * hidden, 3)
    shapes = {
        "fc.weight": (hidden, combined * hidden),
        f"{layer}.self_attn.q_proj.weight": (hidden, inputs),
        f"{layer}.self_attn.k_proj.weight": (kv, inputs),
        f"{layer}.self_attn.v_proj.weight": (kv, inputs),
        f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }
    norms = [f"{layer}.post_attention_layernorm.weight"]
    if method == "eagle3":
        norms += [f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight", "norm.weight"]
        shapes["lm_head.weight"] = (vocabulary, hidden)
    generator = torch.Generator().manual_seed(1)
    weights = {name: _matrix(shape, generator) for name, shape in shapes.items()}
    weights |= {name: torch.ones(hidden) for name in norms}
    path.mkdir()
    save_file(weights, path / MODEL, metadata={"format": "pt"})
    name = "LlamaForCausalLM" if method == "eagle" else "LlamaForCausalLMEagle3"
    config = recipe | {"architectures": [name], "num_hidden_layers": 1, "torch_dtype": "float32"}
    if method == "eagle3":
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (path / "config.json").write_text(json.dumps(config))
    return path


def _with_predictor(
    target: Path, folder: Path, add: Callable[[dict[str, Any], dict[str, Any], Any], dict[str, Any]]
) -> Path:
    """The target with one layer more that predicts. `add`: its weights, from the target's configuration and weights."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / f"{target.name}-mtp"
    if path.exists():
        return path
    shutil.copytree(target, path)
    config, weights = json.loads((path / "config.json").read_text()), load_file(path / MODEL)
    added = add(config, weights, torch.Generator().manual_seed(1))
    save_file(weights | added, path / MODEL, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def _predictor(config: dict[str, Any], weights: dict[str, Any], generator: Any) -> dict[str, Any]:
    """As DeepSeek's multi-token prediction has it: the last layer's shapes, drawn anew."""
    import torch

    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    prefix = f"model.layers.{last + 1}"
    added = _layer_like(weights, last, prefix, generator)
    added |= {f"{prefix}.{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{prefix}.eh_proj.weight"] = _matrix((hidden, 2 * hidden), generator)
    added[f"{prefix}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{prefix}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return added


def _next_predictor(config: dict[str, Any], weights: dict[str, Any], generator: Any) -> dict[str, Any]:
    """As Qwen3-Next has it: a layer of full attention that is counted apart. Its norms add one to their weights."""
    import torch

    hidden = config["hidden_size"]
    added = _layer_like(weights, config["layer_types"].index("full_attention"), "mtp.layers.0", generator)
    added |= {
        f"mtp.{norm}.weight": torch.zeros(hidden) for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    return added | {"mtp.fc.weight": _matrix((hidden, 2 * hidden), generator)}


def _layer_like(weights: dict[str, Any], number: int, prefix: str, generator: Any) -> dict[str, Any]:
    before = f"model.layers.{number}."
    return {
        name.replace(before, f"{prefix}."): _like(weight, generator)
        for name, weight in weights.items()
        if name.startswith(before)
    }


def _matrix(shape: tuple[int, ...], generator: Any) -> Any:
    import torch

    return torch.randn(shape, generator=generator) * (SCALE / shape[-1] ** 0.5)


def _like(weight: Any, generator: Any) -> Any:
    """A matrix is drawn anew; what is smaller, as a norm, is kept."""
    return weight.clone() if weight.dim() < 2 else _matrix(tuple(weight.shape), generator)
