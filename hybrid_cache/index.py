"""Which node holds which prefix: a gateway's view, fed by events.

The view may be late. That costs a miss or a worse route; what a node really serves, the node's own cache decides.
Memory is bounded: past `max_blocks` the blocks heard of first are forgotten. A block on a node's SSD counts as held: the node
reads it back before the request that needs it. So does a block in an engine's own cache: the engine finds it there itself, but
nobody can send it to another node.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from hybrid_cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Medium
from hybrid_cache.everyone import Snapshots, leading_blocks, unbroken_blocks
from hybrid_cache.layout import ModelLayout
from hybrid_cache.lookup import MISS, PrefixHit, longest_common_hit

DEFAULT_MAX_BLOCKS = 4_000_000
ANYWHERE: Final = tuple(Medium)
MOVABLE: Final = (Medium.MEMORY, Medium.SSD)


class Holding(NamedTuple):
    """What a node probably has of a prompt; the last tokens of `hit` may be beyond `movable_tokens`, that others can be sent."""

    hit: PrefixHit
    movable_tokens: int


NOTHING: Final = Holding(MISS, 0)


class PrefixIndex:
    """Prefixes of all nodes that serve one layout. Holders of a block are the bits of an int, one per node and medium."""

    def __init__(self, layout: ModelLayout, *, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        if max_blocks <= 0:
            raise ValueError(f"max_blocks must be positive, not {max_blocks}")
        self.layout = layout
        self.max_blocks = max_blocks
        self._holders: tuple[dict[bytes, int], ...] = tuple({} for _ in layout.groups)
        self._bits: dict[tuple[str, Medium], int] = {}
        self.forgotten_blocks = 0

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self)} blocks, nodes {sorted(self.nodes())})"

    def __len__(self) -> int:
        """Blocks known, each (group, hash) once however many nodes hold it."""
        return sum(map(len, self._holders))

    @property
    def memory_bytes(self) -> int:
        """Size of the tables and the hashes in them (holders of up to 30 nodes are small integers, shared or 28 bytes)."""
        hashes = sum(sys.getsizeof(block_hash) for holders in self._holders for block_hash in holders)
        return hashes + sum(sys.getsizeof(holders) for holders in self._holders)

    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node_id for node_id, _ in self._bits))

    def apply(self, node_id: str, event: CacheEvent) -> None:
        """Takes in what a node reported. Events about groups that the layout has not are a ValueError."""
        if isinstance(event, CacheCleared):
            self._clear(node_id, tuple(Medium) if event.medium is None else (event.medium,))
            self._bit(node_id, Medium.MEMORY)
            return
        if not 0 <= event.group < len(self._holders):
            raise ValueError(f"node {node_id!r} reports group {event.group}; the layout has {len(self._holders)}")
        match event:
            case BlocksStored(group=group, hashes=hashes, medium=medium):
                self._store(self._holders[group], self._bit(node_id, medium), hashes)
            case BlocksRemoved(group=group, hashes=hashes, medium=medium):
                self._remove(self._holders[group], self._bit(node_id, medium), hashes)

    def drop(self, node_id: str) -> None:
        """Forgets a node: it is gone, or will send a snapshot."""
        self._clear(node_id, tuple(Medium))

    def match(
        self, node_id: str, hashes: Sequence[bytes], num_tokens: int, media: Sequence[Medium] = ANYWHERE
    ) -> PrefixHit:
        """What `node_id` can probably reuse of a prompt's first `num_tokens` tokens, out of these media."""
        bits = sum([self._bits.get((node_id, medium), 0) for medium in media])
        if not bits:
            return MISS
        held = tuple(_HeldBy(holders, bits) for holders in self._holders)
        if bits != self._bits.get((node_id, Medium.MEMORY)):  # in the others, blocks may be missing anywhere
            hashes = hashes[: self._leading(held, hashes[: num_tokens // self.layout.block_size])]
        return longest_common_hit(self.layout, held, hashes, num_tokens)

    def match_all(self, hashes: Sequence[bytes], num_tokens: int) -> dict[str, "Holding"]:
        """`match` and `movable_tokens` of every node that is known, in one look at the prompt."""
        found: dict[str, Holding] = {}
        if self.layout.window_groups or not self.layout.full_groups:
            for node_id in self.nodes():
                hit = self.match(node_id, hashes, num_tokens)
                found[node_id] = Holding(hit, self.movable_tokens(node_id, hashes, hit))
            return found
        names: dict[str, dict[Medium, int]] = {}
        for (node_id, medium), bit in self._bits.items():
            names.setdefault(node_id, {})[medium] = bit
        limit = min(num_tokens // self.layout.block_size, len(hashes))
        lengths = self._lengths(names, hashes, limit)
        states = [self._holders[group] for group in self.layout.state_groups]
        longest = max(lengths.values(), default=0)
        snapshots = Snapshots(states, hashes, longest) if states else None
        size = self.layout.block_size
        for node_id, media in names.items():
            attention = lengths[node_id]
            agreed = snapshots.longest(sum(media.values()), attention) if snapshots and attention else attention
            hit = PrefixHit(agreed * size, attention * size)
            movable = agreed * size
            if agreed and Medium.ENGINE in media:
                movable = self.match(node_id, hashes, hit.num_tokens, MOVABLE).num_tokens
            found[node_id] = Holding(hit, movable)
        return found

    def _lengths(
        self, names: Mapping[str, Mapping[Medium, int]], hashes: Sequence[bytes], limit: int
    ) -> dict[str, int]:
        """Leading blocks of which each node holds the attention."""
        full = [self._holders[group] for group in self.layout.full_groups]
        closed = {media[Medium.MEMORY]: name for name, media in names.items() if list(media) == [Medium.MEMORY]}
        open_ = {sum(media.values()): name for name, media in names.items() if list(media) != [Medium.MEMORY]}
        lengths = {open_[bits]: length for bits, length in unbroken_blocks(full, list(open_), hashes, limit).items()}
        for length, nodes in leading_blocks(full, sum(closed), hashes, limit) if closed else ():
            while nodes:
                bit = nodes & -nodes
                lengths[closed[bit]] = length
                nodes ^= bit
        return lengths

    def movable_tokens(self, node_id: str, hashes: Sequence[bytes], hit: PrefixHit) -> int:
        """How much of `hit` the node can send to another one."""
        if (node_id, Medium.ENGINE) not in self._bits:
            return hit.num_tokens
        return self.match(node_id, hashes, hit.num_tokens, MOVABLE).num_tokens

    def _leading(self, held: Sequence["_HeldBy"], hashes: Sequence[bytes]) -> int:
        """Blocks of the prompt up to the first that some full-attention group lacks."""
        full = [held[group] for group in self.layout.full_groups]
        missing = (i for i, block_hash in enumerate(hashes) if any(block_hash not in group for group in full))
        return next(missing, len(hashes))

    def _bit(self, node_id: str, medium: Medium) -> int:
        key = (node_id, medium)
        if key not in self._bits:
            used = sum(self._bits.values())
            self._bits[key] = ~used & (used + 1)  # the lowest bit nobody has
        return self._bits[key]

    def _clear(self, node_id: str, media: Sequence[Medium]) -> None:
        bits = sum(self._bits.pop((node_id, medium), 0) for medium in media)
        if not bits:
            return
        for holders in self._holders:
            self._remove(holders, bits, [block_hash for block_hash, nodes in holders.items() if nodes & bits])

    def _store(self, holders: dict[bytes, int], bit: int, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            holders[block_hash] = holders.get(block_hash, 0) | bit
        excess = len(self) - self.max_blocks
        if excess > 0:
            self._forget(excess)

    def _remove(self, holders: dict[bytes, int], bit: int, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            left = holders.get(block_hash, 0) & ~bit
            if left:
                holders[block_hash] = left
            else:
                holders.pop(block_hash, None)

    def _forget(self, count: int) -> None:
        # One group at a time, the largest; what is left over goes with the next call.
        largest = max(self._holders, key=lambda holders: len(holders))
        for block_hash in list(islice(largest, count)):
            del largest[block_hash]
            self.forgotten_blocks += 1


class _HeldBy:
    """The blocks of one group that one node holds in any of its media."""

    __slots__ = ("bits", "holders")

    def __init__(self, holders: dict[bytes, int], bits: int) -> None:
        self.holders = holders
        self.bits = bits

    def __contains__(self, block_hash: object) -> bool:
        return bool(self.holders.get(block_hash, 0) & self.bits)  # type: ignore[call-overload]
