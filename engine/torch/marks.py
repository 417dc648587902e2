"""Saves a sequence's state at a block border of its answer, so that the answer's blocks can become prefix cache.

Full attention keeps every token and needs no remembering. A state serves exactly the length it was taken at, and a window
moves on; both are taken at each border that decoding passes, and the last one counts:

    tokens    | prompt .................. | answer ........................ |
    borders       b       b       b       b       b       b       b
    window                                        |..... whole blocks ....|
    mark                                                                  ^ states, window rows
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from engine.torch.kv_layers import SequenceCache
from hybrid_cache.layout.layout import ModelLayout


class Rows(NamedTuple):
    """K and V of consecutive tokens of one layer, [1, heads, tokens, dim] each; `start` is the first token."""

    start: int
    keys: torch.Tensor
    values: torch.Tensor

    def pieces(self, tokens: int) -> "Iterator[Rows]":
        """The same in parts of at most `tokens` tokens."""
        for at in range(0, self.keys.shape[2], tokens):
            yield Rows(self.start + at, self.keys[:, :, at : at + tokens], self.values[:, :, at : at + tokens])


class BorderMarks:
    """The last block border that an answer has passed, with the states there."""

    def __init__(self, cache: SequenceCache, layout: ModelLayout, num_tokens: int) -> None:
        """`num_tokens` are in `cache` when the answer begins."""
        self.num_tokens = 0
        self.states: dict[int, list[torch.Tensor]] = {}
        self._cache = cache
        self._layout = layout
        self._windows = {
            layer: _Window.of(cache.layers[layer], num_tokens, group)
            for group in layout.window_groups
            for layer in layout.groups[group].layers
        }
        self._marked: dict[int, Rows] = {}

    def on_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`layer` has K and V of one more token."""
        if (window := self._windows.get(layer)) is not None:
            window.parts.append((keys, values))

    def at(self, num_tokens: int) -> None:
        """`num_tokens` are there now. Takes a mark on a border whose windows can be had in whole blocks."""
        if num_tokens % self._layout.block_size:
            return
        windows = {layer: self._whole_blocks(window, num_tokens) for layer, window in self._windows.items()}
        whole = {layer: rows for layer, rows in windows.items() if rows is not None}
        if len(whole) < len(windows):
            return  # rows of the prompt are gone that a block of the window needs
        self.num_tokens, self._marked = num_tokens, whole
        linear = self._cache.linear_layers()
        self.states = {number: [state.clone() for state in layer.states()] for number, layer in linear.items()}

    def attention(self, cached_tokens: int) -> dict[int, Rows]:
        """What pages need where the first `cached_tokens` tokens are cached; windows whole, full attention from there."""
        rows = dict(self._marked)
        for number, layer in self._cache.attention_layers().items():
            if number not in rows and layer.is_initialized:
                part = slice(cached_tokens, self.num_tokens)
                rows[number] = Rows(cached_tokens, layer.keys[:, :, part], layer.values[:, :, part])
        return {number: each for number, each in rows.items() if each.keys.shape[2]}

    def _whole_blocks(self, window: "_Window", num_tokens: int) -> Rows | None:
        first = self._layout.window_blocks(window.group, num_tokens).start * self._layout.block_size
        window.forget_before(first)
        rows = window.joined()
        return rows if rows.start <= first else None


class _Window:
    """The last rows of a window layer: up to a block more than attention keeps itself."""

    def __init__(self, group: int, start: int) -> None:
        self.group = group
        self.start = start
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def of(cls, layer: Any, num_tokens: int, group: int) -> "_Window":
        if not num_tokens or not layer.is_initialized:
            return cls(group, num_tokens)
        window = cls(group, num_tokens - layer.keys.shape[2])
        window.parts.append((layer.keys, layer.values))
        return window

    def joined(self) -> Rows:
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*self.parts, strict=True))
        self.parts = [(keys, values)]
        return Rows(self.start, keys, values)

    def forget_before(self, first: int) -> None:
        _, keys, values = self.joined()
        if (gone := first - self.start) > 0:
            self.start = first
            self.parts = [(keys[:, :, gone:], values[:, :, gone:])]
