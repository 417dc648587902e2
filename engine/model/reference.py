"""The yardstick: greedy tokens of a plain `transformers.generate`, none of our caches involved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.model.embedded import load_model


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
