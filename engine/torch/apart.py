"""Tests whether a model keeps all state of a sequence in its cache: some keep it in modules (RecurrentGemma)."""

from collections.abc import Callable
from typing import TypeVar

import torch

S = TypeVar("S")


def are_apart(begin: Callable[[], S], feed: Callable[[S, int, int], torch.Tensor]) -> bool:
    """Whether a sequence comes to the same beside another one as alone, bit for bit.

    `feed(sequence, kind, num_tokens)` gives a sequence a chunk, another one for each `kind`, and returns what it came to.
    """
    alone, beside, other = begin(), begin(), begin()
    feed(alone, 1, 3)
    expected = feed(alone, 2, 1)
    feed(beside, 1, 3)
    feed(other, 3, 5)
    feed(other, 4, 1)
    return torch.equal(feed(beside, 2, 1), expected)
