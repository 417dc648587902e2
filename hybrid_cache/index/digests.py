"""A gateway's view of prefixes far away, by the digests of their nodes: the same table as `index`, under short names.

A hit ends with the last named block that a node holds, some blocks before its real end. Where the model has states, it ends
at one of those: each has a name, so such a hit is exact. Short names that two blocks share make some hits too long.
"""

from collections.abc import Mapping, Sequence
from typing import overload

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from hybrid_cache.cache.lookup import PrefixHit, longest_common_hit
from hybrid_cache.index.digest import NAME_BYTES, DigestCleared, DigestEvent, named_at, short_name
from hybrid_cache.index.everyone import SnapshotLengths, leading_blocks
from hybrid_cache.index.holders import HolderSets
from hybrid_cache.index.index import NOTHING, Holding, PrefixIndex, bits_of
from hybrid_cache.layout.layout import ModelLayout


class DigestIndex:
    """Digests of all nodes of one layout that send them."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout = layout
        self._names = PrefixIndex(layout)
        self._asked: tuple[Sequence[bytes], int, list[int], list[bytes]] = ((), 0, [], [])  # the last prompt

    def __len__(self) -> int:
        """Names in the table, each once for each group."""
        return len(self._names)

    @property
    def memory_bytes(self) -> int:
        return self._names.memory_bytes

    def nodes(self) -> tuple[str, ...]:
        return self._names.nodes()

    def apply(self, node_id: str, event: DigestEvent) -> None:
        """Applies what a node says. Raises ValueError for a group that the layout does not have."""
        if isinstance(event, DigestCleared):
            self._names.apply(node_id, CacheCleared())
            return
        for kind, names in ((BlocksStored, event.added), (BlocksRemoved, event.removed)):
            if names:
                self._names.apply(node_id, kind(event.group, names, event.medium))

    def drop(self, node_id: str) -> None:
        self._names.drop(node_id)

    def tidy(self) -> int:
        """One step of taking dropped nodes out: the work done, 0 when there is nothing left to do."""
        return self._names.tidy()

    def match_all(self, hashes: Sequence[bytes], num_tokens: int) -> dict[str, Holding]:
        """What each node that sends digests probably holds of a prompt's first `num_tokens` tokens."""
        found: dict[str, Holding] = {}
        for medium, known in (
            (Medium.MEMORY, self._names.bits(Medium.MEMORY)),
            (Medium.ENGINE, self._names.bits(Medium.ENGINE)),
        ):
            if not known:
                continue
            look = self._each if self.layout.window_groups or not self.layout.full_groups else self._together
            sets = look(known, hashes, num_tokens)
            if medium is Medium.MEMORY:
                found = _spread([(Holding(hit, hit.num_tokens), nodes) for hit, nodes in sets], known)
                continue
            for node_id, kept in _spread([(Holding(hit, 0), nodes) for hit, nodes in sets], known).items():
                sent = found.get(node_id, NOTHING)
                found[node_id] = (
                    kept._replace(movable_tokens=sent.movable_tokens) if _length(kept) > _length(sent) else sent
                )
        return found

    def _together(
        self, named: Mapping[int, str], hashes: Sequence[bytes], num_tokens: int
    ) -> list[tuple[PrefixHit, int]]:
        """Hits, each with the bits of the nodes that have it: all are asked together as far as they agree."""
        size = self.layout.block_size
        limit = min(num_tokens // size, len(hashes))
        at, names = self._named(hashes, limit)
        holders, everybody = self._names.holders, sum(named)
        full = [holders[group] for group in self.layout.full_groups]
        groups = [holders[group] for group in self.layout.state_groups]
        states = SnapshotLengths(groups, _ShortNames(hashes), everybody) if groups else None
        found: list[tuple[PrefixHit, int]] = []
        for count, nodes in leading_blocks(full, everybody, names, len(names)):
            low = at[count - 1] + 1 if count else 0
            high = at[count] if count < len(at) else limit  # of the blocks behind the named one nothing is known
            for agreed, these in states.split(nodes, high) if states is not None else ((low, nodes),):
                found.append((PrefixHit(agreed * size, max(agreed, low) * size), these))
        return found

    def _each(self, named: Mapping[int, str], hashes: Sequence[bytes], num_tokens: int) -> list[tuple[PrefixHit, int]]:
        """The same by one look for each node: of layouts with windows, which many nodes cannot be asked about together."""
        full = set(self.layout.full_groups)
        return [
            (
                longest_common_hit(
                    self.layout,
                    [
                        _NamedBlocks(holders, bit, is_sampled=group in full)
                        for group, holders in enumerate(self._names.holders)
                    ],
                    hashes,
                    num_tokens,
                ),
                bit,
            )
            for bit in named
        ]

    def _named(self, hashes: Sequence[bytes], limit: int) -> tuple[list[int], list[bytes]]:
        """Where a prompt's named blocks are, and their names: a prompt is looked up more than once."""
        if self._asked[0] is not hashes or self._asked[1] != limit:
            at = named_at(hashes, limit)
            self._asked = hashes, limit, at, [hashes[each][:NAME_BYTES] for each in at]
        return self._asked[2:]


def _length(holding: Holding) -> tuple[int, int]:
    return holding.hit.num_tokens, holding.hit.attention_tokens


def _spread(sets: Sequence[tuple[Holding, int]], named: Mapping[int, str]) -> dict[str, Holding]:
    """The same by node. Most nodes hold as much: their system prompt, or nothing."""
    most, _ = max(sets, key=lambda each: each[1].bit_count())
    found = dict.fromkeys(named.values(), most)
    for holding, nodes in sets:
        if holding is not most:
            found.update([(named[bit], holding) for bit in bits_of(nodes)])
    return found


class _ShortNames(Sequence[bytes]):
    """The short names of a prompt's blocks, made when they are asked for."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self._hashes = hashes

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [each[:NAME_BYTES] for each in self._hashes[at]]
        return self._hashes[at][:NAME_BYTES]


class _NamedBlocks:
    """The blocks of one group that one node has, as far as its digest says: those without a name are taken to be there."""

    __slots__ = ("_bit", "_holders", "_is_sampled")

    def __init__(self, holders: HolderSets, bit: int, *, is_sampled: bool) -> None:
        self._holders = holders
        self._bit = bit
        self._is_sampled = is_sampled

    def __contains__(self, block_hash: object) -> bool:
        assert isinstance(block_hash, bytes)
        if self._is_sampled and not named_at([block_hash], 1):
            return True
        return bool(self._holders.get(short_name(block_hash)) & self._bit)
