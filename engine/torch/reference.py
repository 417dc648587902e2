"""The yardstick: greedy tokens of a plain `transformers.generate`, none of our caches involved."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from engine.torch.embedded import load_model

# Logits this close may change places with the order of float32 sums: with the CPU, the batch and the chunk.
TIE: Final = 5e-6


def reference_tokens(model: Any, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """The greedy continuation of `prompt`. Without `ignore_eos` it may end early, with the EOS token as its last.

    `model` is a loaded transformers model or the directory of one.
    """
    if isinstance(model, str | Path):
        model = load_model(Path(model))
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([list(prompt)], dtype=torch.long),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None if ignore_eos else model.config.eos_token_id,
            pad_token_id=0,
        )
    return [int(token) for token in output[0, len(prompt) :]]


def closest_routing(model: Any, tokens: Sequence[int]) -> float:
    """The least difference, in any layer's router, between the last expert that a token gets and the next; inf without experts.

    The order of sums decides between experts this close, as between tokens. It changes all logits that follow.
    """
    config = model.config
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not num_experts:
        return math.inf
    taken = config.num_experts_per_tok
    found = [math.inf]

    def see(_module: Any, _inputs: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple) else ():
            if isinstance(part, torch.Tensor) and part.is_floating_point() and part.shape[-1] == num_experts > taken:
                best = torch.topk(part.float(), taken + 1, dim=-1).values
                found.append(float((best[..., taken - 1] - best[..., taken]).min()))

    hooks = [each.register_forward_hook(see) for each in model.modules()]
    try:
        with torch.inference_mode():
            model(torch.tensor([list(tokens)], dtype=torch.long))
    finally:
        for hook in hooks:
            hook.remove()
    return min(found)


def first_tie(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The index of the first of `tokens` whose rival has the same logit but for rounding: no yardstick for another machine.

    `model` is a loaded transformers model; `tokens` is what `reference_tokens` gave for `prompt`.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]], dtype=torch.long)).logits[0, len(prompt) - 1 : -1].float()
    best = torch.topk(logits, 2, dim=-1).values
    ties = torch.nonzero(best[:, 0] - best[:, 1] < TIE)
    return int(ties[0]) if len(ties) else None
