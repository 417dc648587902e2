"""A request's hold on the cache."""

from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Final

from hybrid_cache.cache.blocks import BlockRun, Companion, Pages
from hybrid_cache.layout.layout import ModelLayout


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
    path: list[tuple[BlockRun, int]] = field(default_factory=list)  # from the root, each run with how many blocks of it
    locked: int = 0  # blocks of that path
    companions: list[Companion] = field(default_factory=list)  # locked
    own_first: int = 0
    own: list[int] = field(
        default_factory=list
    )  # as `BlockRun.pages`, from block `own_first` on; what is not committed
    doubles: list[int] = field(default_factory=list)  # pages of blocks before, which others have committed meanwhile
    own_windows: dict[tuple[int, int], Pages] = field(default_factory=dict)  # (group, block)
    own_states: dict[tuple[int, int], Pages] = field(default_factory=dict)  # (group, length)
    pages_ahead: int = 0  # that were evictable when it locked them in steps

    def own_pages(self) -> list[int]:
        held = self.doubles + self.own
        for owned in (self.own_windows, self.own_states):
            held += [page for pages in owned.values() for page in pages]
        return held

    def take_own(self, start: int, stop: int, width: int) -> list[int]:
        """The pages of blocks [start, stop) are its own no longer; those of own blocks before them stay so."""
        skipped, end = (start - self.own_first) * width, (stop - self.own_first) * width
        self.doubles += self.own[:skipped]
        taken = self.own[skipped:end]
        del self.own[:end]
        self.own_first = stop
        return taken

    def let_go(self) -> list[int]:
        """Its own pages, which it has no longer."""
        held = self.own_pages()
        self.own, self.doubles, self.own_windows, self.own_states = [], [], {}, {}
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
        self._width = block_pages(layout)
        self._pages: list[int] = []
        for run, stop in hold.path:
            self._pages += run.pages[: stop * self._width]
        self._pages += hold.own
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
        blocks: list[list[Pages]] = [[] for _ in layout.groups]
        for group, part in zip(layout.full_groups, full_group_parts(layout), strict=True):
            blocks[group] = rows_of(self._pages, self._width, part)
        for group in layout.window_groups:
            blocks[group] = [()] * -(-self.num_tokens // layout.block_size)
        for companion in self._companions:
            if companion.group in layout.window_groups:
                blocks[companion.group][companion.index] = companion.pages
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
    """Where the pages of each full-attention group lie among those of a block."""
    ends = list(accumulate(layout.pages_per_block(group) for group in layout.full_groups))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def block_pages(layout: ModelLayout) -> int:
    """Pages of a block, of all full-attention groups."""
    return sum([layout.pages_per_block(group) for group in layout.full_groups])


def rows_of(pages: list[int], width: int, part: slice) -> list[Pages]:
    """A part of each block's pages, of pages that are block after block `width` ones."""
    return list(zip(*[pages[place::width] for place in range(part.start, part.stop)], strict=True))
