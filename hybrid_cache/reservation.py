"""What one request holds of the cache."""

from dataclasses import dataclass, field
from enum import Enum

from hybrid_cache.blocks import Companion, Node, Pages


class Purpose(Enum):
    """What a reservation is for."""

    PREFILL = "prefill"  # load [0, cached_tokens), compute the rest here
    LANDING = "landing"  # full attention of [0, cached_tokens) is here, the rest arrives by transfer
    PROMOTION = "promotion"  # a landing from a lower tier, ahead of the request that needs it
    ATTENTION = "attention"  # a promotion of full attention alone, ahead of a landing: no window tails, no snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pages of one request; mirrors the JobPages message.

    `blocks[g][i]` are the pages of block i of group g (empty where nothing is stored, e.g. out of every window).
    `states[g][length]` are the pages of the snapshot of group g at `length` tokens. Pages of `[0, cached_tokens)` are
    shared and read-only; all others are the request's own until `commit`.
    """

    request_id: str
    purpose: Purpose
    num_tokens: int
    cached_tokens: int
    blocks: tuple[tuple[Pages, ...], ...]
    states: tuple[dict[int, Pages], ...]


@dataclass(slots=True, kw_only=True)
class Hold:
    """The cache's side of a reservation: what it locks, what it owns, until when."""

    request_id: str
    hashes: list[bytes]
    num_tokens: int
    deadline: float
    nodes: list[Node] = field(default_factory=list)  # the locked path from the root: [0, len(nodes)) blocks
    companions: list[Companion] = field(default_factory=list)  # locked
    own_nodes: dict[int, tuple[Pages, ...]] = field(default_factory=dict)  # block: pages per full-attention group
    own_windows: dict[tuple[int, int], Pages] = field(default_factory=dict)  # (group, block)
    own_states: dict[tuple[int, int], Pages] = field(default_factory=dict)  # (group, length)

    def own_pages(self) -> list[int]:
        held = [page for node in self.own_nodes.values() for pages in node for page in pages]
        for owned in (self.own_windows, self.own_states):
            held += [page for pages in owned.values() for page in pages]
        return held
