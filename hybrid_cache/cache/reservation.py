"""A request's hold on the cache."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Final

from hybrid_cache.cache.blocks import BlockNode, Companion, Pages
from hybrid_cache.layout.layout import ModelLayout

_pages: Final = attrgetter("pages")


class Purpose(Enum):
    """The purpose of a reservation."""

    PREFILL = "prefill"  # load [0, cached_tokens), compute the rest here
    LANDING = "landing"  # full attention of [0, cached_tokens) is here, the rest arrives by transfer
    ANSWER = "answer"  # as a landing, but from this node's engine, which holds what it computed while it answered
    PROMOTION = "promotion"  # a landing from a lower tier, ahead of the request that needs it
    ATTENTION = "attention"  # a promotion of full attention alone, ahead of a landing: no window tails, no snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Hints about a prompt beyond its tokens. Later prompts leave it at `branch_tokens`: a state is kept at each of
    these lengths where a block ends. `category` is the kind of request, for eviction policies that use it. Nothing
    after `useful_tokens` is expected to be used again.
    """

    branch_tokens: tuple[int, ...] = ()
    category: str = ""
    useful_tokens: int | None = None


NO_HINTS: Final = Hints()


@dataclass(slots=True)
class ReservedPages:
    """The cache's side of a reservation: what it locks and what it owns."""

    request_id: str
    hashes: list[bytes]
    num_tokens: int
    nodes: list[BlockNode] = field(default_factory=list)  # the locked path from the root: [0, len(nodes)) blocks
    companions: list[Companion] = field(default_factory=list)  # locked
    first_own: int = 0
    own_blocks: list[Pages] = field(
        default_factory=list
    )  # as `BlockNode.pages`, from block `first_own` on; () once committed
    own_windows: dict[tuple[int, int], Pages] = field(default_factory=dict)  # (group, block)
    own_states: dict[tuple[int, int], Pages] = field(default_factory=dict)  # (group, length)
    pages_ahead: int = 0  # that were evictable when it locked them in steps

    def own_pages(self) -> list[int]:
        held = list(chain.from_iterable(self.own_blocks))
        for owned in (self.own_windows, self.own_states):
            held += [page for pages in owned.values() for page in pages]
        return held


class Reservation:
    """Pages of one request as they were reserved; mirrors the JobPages message.

    Pages of `[0, cached_tokens)` are shared and read-only; all others are the request's own until `commit`.
    """

    def __init__(self, hold: ReservedPages, layout: ModelLayout, purpose: Purpose, cached_tokens: int) -> None:
        self.request_id = hold.request_id
        self.purpose = purpose
        self.num_tokens = hold.num_tokens
        self.cached_tokens = cached_tokens
        self._layout = layout
        # The hold changes later. Page tables are made from this only when asked for; a simulator never asks.
        self._shared = tuple(hold.nodes)
        self._own_blocks = tuple(hold.own_blocks)
        self._companions = tuple(hold.companions)
        self._own_windows = dict(hold.own_windows)
        self._own_states = dict(hold.own_states)

    def __repr__(self) -> str:
        return (
            f"Reservation({self.request_id!r}, {self.purpose.value}, {self.cached_tokens} of {self.num_tokens} cached)"
        )

    @cached_property
    def blocks(self) -> tuple[tuple[Pages, ...], ...]:
        """`blocks[g][i]`: the pages of block i of group g (empty where nothing is stored, e.g. out of every window)."""
        layout = self._layout
        full = [*map(_pages, self._shared), *self._own_blocks]
        blocks: list[list[Pages]] = [[] for _ in layout.groups]
        parts = full_group_parts(layout)
        for group, part in zip(layout.full_groups, parts, strict=True):
            blocks[group] = [pages[part] for pages in full] if len(parts) > 1 else full
        for group in layout.window_groups:
            blocks[group] = [()] * -(-self.num_tokens // layout.block_size)
        for companion in self._companions:
            if companion.group in layout.window_groups:
                blocks[companion.group][companion.node.index] = companion.pages
        for (group, index), pages in self._own_windows.items():
            blocks[group][index] = pages
        return tuple(tuple(of_group) for of_group in blocks)

    @cached_property
    def states(self) -> tuple[dict[int, Pages], ...]:
        """`states[g][length]`: the pages of the snapshot of group g at `length` tokens."""
        states: list[dict[int, Pages]] = [{} for _ in self._layout.groups]
        for companion in self._companions:
            if companion.group in self._layout.state_groups:
                states[companion.group][self.cached_tokens] = companion.pages
        for (group, length), pages in self._own_states.items():
            states[group][length] = pages
        return tuple(states)


def full_group_parts(layout: ModelLayout) -> list[slice]:
    """Where the pages of each full-attention group lie in `BlockNode.pages`."""
    ends = list(accumulate(layout.pages_per_block(group) for group in layout.full_groups))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
