"""A gateway's view of the nodes' prefixes, fed by events.

The view may be late. That costs a miss or a worse route; the node's own cache decides what it really serves. Memory is
bounded: past `max_blocks` the blocks heard of first are forgotten. A block on a node's SSD counts as held: the node
reads it back before the request that needs it. So does a block in an engine's own cache: the engine finds it there
itself, but it cannot be sent to another node. Attention is taken to be prefix-closed in a node's memory, and so in an
engine's cache: vLLM frees a request's blocks from the end, and evicts them in the order in which they were freed. On an
SSD anything may be missing.

A node that is dropped serves no hit from then on: its bit is free. The bit is taken out of the table in steps (`tidy`), and
given to another one only after that; a snapshot that comes meanwhile is stored under a new one.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Medium
from hybrid_cache.cache.lookup import MISS, PrefixHit, longest_common_hit
from hybrid_cache.index.everyone import SnapshotLengths, leading_blocks, unbroken_blocks
from hybrid_cache.index.holders import PARTS, HolderSets
from hybrid_cache.layout.layout import ModelLayout

DEFAULT_MAX_BLOCKS = 4_000_000
TIDY_WORK: Final = 2048  # of one step, in blocks taken out: about a millisecond
MOST_SETS: Final = 24  # where hardly two nodes hold as much, each is asked on its own
ANYWHERE: Final = tuple(Medium)
MOVABLE: Final = (Medium.MEMORY, Medium.SSD)
PLANE: Final = (
    64  # a node's bit for its engine's cache is so many places above the one for its memory: a shift tells nodes apart
)


class Holding(NamedTuple):
    """A node's probable hit for a prompt. It can send only `movable_tokens` of `hit` to other nodes."""

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
        self._holders: tuple[HolderSets, ...] = tuple(HolderSets() for _ in layout.groups)
        self._bits: dict[tuple[str, Medium], int] = {}
        self._used = 0  # all of these
        self._known: _Known | None = None  # made of the bits, until these change
        self._dead_bits = 0  # of dropped nodes; still in the table
        self._tidying = 0  # those of them that are being taken out now
        self._found: list[bytes] = []  # blocks of the part at hand that are theirs
        self._tidied_parts = 0  # of all groups' tables, one after the other
        self.forgotten_blocks = 0

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self)} blocks, nodes {sorted(self.nodes())})"

    def __len__(self) -> int:
        """Blocks in the table, each (group, hash) once however many nodes hold it; those of dropped nodes until tidied."""
        return sum(map(len, self._holders))

    def blocks_of(self, group: int) -> int:
        """The same of one group."""
        return len(self._holders[group])

    @property
    def memory_bytes(self) -> int:
        """Size of the tables, the hashes and the sets of holders in them."""
        hashes = sum(sys.getsizeof(block_hash) for holders in self._holders for block_hash in holders)
        return hashes + sum(holders.table_bytes + holders.sets_bytes for holders in self._holders)

    @property
    def holders(self) -> Sequence[HolderSets]:
        """The table of each group."""
        return self._holders

    def bits(self, medium: Medium) -> dict[int, str]:
        """The nodes that have anything in a medium, by their bits in the tables."""
        return {bit: node_id for (node_id, each), bit in self._bits.items() if each is medium}

    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node_id for node_id, _ in self._bits))

    def apply(self, node_id: str, event: CacheEvent) -> None:
        """Applies a node's events. Raises ValueError for a group that the layout does not have."""
        self.tidy()  # garbage cannot grow faster than it goes, tidied elsewhere or not
        if isinstance(event, CacheCleared):
            self._clear(node_id, tuple(Medium) if event.medium is None else (event.medium,))
            self._bit(node_id, Medium.MEMORY)
            self.tidy()
            return
        if not 0 <= event.group < len(self._holders):
            raise ValueError(f"node {node_id!r} reports group {event.group}; the layout has {len(self._holders)}")
        match event:
            case BlocksStored(group=group, hashes=hashes, medium=medium):
                self._store(self._holders[group], self._bit(node_id, medium), hashes)
            case BlocksRemoved(group=group, hashes=hashes, medium=medium):
                self._holders[group].remove(hashes, self._bit(node_id, medium))

    def drop(self, node_id: str) -> None:
        """Forgets a node: it is gone, or will send a snapshot. What is left of it in the table goes by `tidy`."""
        self._clear(node_id, tuple(Medium))
        self.tidy()

    def tidy(self) -> int:
        """One step of taking dropped nodes out of the table: the work done, 0 when there is nothing left to do.

        The work of a step is TIDY_WORK or one part of the table more, in blocks taken out; one that is looked at is a tenth.
        """
        work = 0
        self._tidying = self._tidying or self._dead_bits
        while self._tidying and work < TIDY_WORK:
            group, part = divmod(self._tidied_parts, PARTS)
            holders = self._holders[group]
            if not self._found:
                entries = holders.parts[part]
                self._found = [block_hash for block_hash, nodes in entries.items() if nodes & self._tidying]
                work += 1 + len(entries) // 10
            found, self._found = self._found[:TIDY_WORK], self._found[TIDY_WORK:]
            holders.remove(found, self._tidying)
            work += len(found)
            if not self._found:
                self._next_part()
        return work

    def _next_part(self) -> None:
        self._tidied_parts += 1
        if self._tidied_parts == PARTS * len(self._holders):
            self._dead_bits &= ~self._tidying
            self._tidying = self._tidied_parts = 0

    def match(
        self, node_id: str, hashes: Sequence[bytes], num_tokens: int, media: Sequence[Medium] = ANYWHERE
    ) -> PrefixHit:
        """What `node_id` can probably reuse of a prompt's first `num_tokens` tokens, out of these media."""
        held_in = _Media.of({medium: bit for medium in media if (bit := self._bits.get((node_id, medium)))})
        if not held_in.bits:
            return MISS
        held = tuple(_HeldBy(holders, held_in.bits) for holders in self._holders)
        if self.layout.full_groups and (len(held_in.closed) > 1 or held_in.has_holes):
            full = [self._holders[group] for group in self.layout.full_groups]
            limit = min(num_tokens // self.layout.block_size, len(hashes))
            led = leading_blocks(full, sum(held_in.closed), hashes, limit) if held_in.closed else ()
            hashes = hashes[: held_in.attention(full, _lengths(led), hashes, limit)]
        return longest_common_hit(self.layout, held, hashes, num_tokens)

    def match_all(self, hashes: Sequence[bytes], num_tokens: int) -> dict[str, "Holding"]:
        """`match` and `movable_tokens` of every node that is known, in one look at the prompt."""
        found: dict[str, Holding] = {}
        if self.layout.window_groups or not self.layout.full_groups:
            for node_id in self.nodes():
                hit = self.match(node_id, hashes, num_tokens)
                found[node_id] = Holding(hit, self.movable_tokens(node_id, hashes, hit))
            return found
        known = self._known or self._look_up()
        look = _Look(self.layout, self._holders, known, hashes, num_tokens)
        alone = known.others
        if look.num_lengths > MOST_SETS:
            alone = known.everybody
        elif sets := look.sets(known.nodes, known.engines):  # most nodes hold as much: their system prompt, or nothing
            _, most = max(sets, key=_how_many)
            found = dict.fromkeys(known.names.values(), most)
            for nodes, holding in sets:
                if holding is not most:
                    found.update([(known.names[bit], holding) for bit in bits_of(nodes)])
        return found | look.each(alone) if alone else found

    def _look_up(self) -> "_Known":
        names: dict[str, dict[Medium, int]] = {}
        for (node_id, medium), bit in self._bits.items():
            names.setdefault(node_id, {})[medium] = bit
        self._known = _Known.of(names)
        return self._known

    def movable_tokens(self, node_id: str, hashes: Sequence[bytes], hit: PrefixHit) -> int:
        """How much of `hit` the node can send to another one."""
        if (node_id, Medium.ENGINE) not in self._bits:
            return hit.num_tokens
        return self.match(node_id, hashes, hit.num_tokens, MOVABLE).num_tokens

    def _bit(self, node_id: str, medium: Medium) -> int:
        if (bit := self._bits.get((node_id, medium))) is None:
            bit = self._bits[node_id, medium] = self._free_bit(node_id, medium)
            self._used |= bit
            self._known = None
        return bit

    def _free_bit(self, node_id: str, medium: Medium) -> int:
        """A free one: a node's memory and its engine's cache a PLANE apart, unless that one is being tidied."""
        used = self._used | self._dead_bits
        if medium is Medium.ENGINE and (memory := self._bits.get((node_id, Medium.MEMORY))):
            wanted = memory << PLANE
        elif medium is Medium.MEMORY and (engine := self._bits.get((node_id, Medium.ENGINE))):
            wanted = engine >> PLANE
        else:
            wanted = 0
        if wanted and not wanted & used:
            return wanted
        low = _lowest_free(used)
        return low << PLANE if medium is Medium.ENGINE else low

    def _clear(self, node_id: str, media: Sequence[Medium]) -> None:
        self._known = None
        left = sum(self._bits.pop((node_id, medium), 0) for medium in media)
        self._used &= ~left
        self._dead_bits |= left

    def _store(self, holders: HolderSets, bit: int, hashes: Sequence[bytes]) -> None:
        holders.add(hashes, bit)
        excess = len(self) - self.max_blocks
        if excess > 0:
            # One group at a time, the largest; what is left over goes with the next call.
            largest = max(self._holders, key=len)
            excess = min(excess, len(largest))
            largest.forget(excess)
            self.forgotten_blocks += excess


class _Media(NamedTuple):
    """Some media of one node, as bits: all of them, those that are prefix-closed, and whether there are others."""

    bits: int
    closed: tuple[int, ...]
    has_holes: bool

    @classmethod
    def of(cls, media: Mapping[Medium, int]) -> Self:
        closed = tuple(bit for medium, bit in media.items() if medium is not Medium.SSD)
        return cls(sum(media.values()), closed, Medium.SSD in media)

    def attention(
        self, full: Sequence[HolderSets], lengths: Mapping[int, int], hashes: Sequence[bytes], limit: int
    ) -> int:
        """Leading blocks whose attention is here; `lengths` are those of each closed bit."""
        longest = 0
        for bit in self.closed:
            if (length := lengths[bit]) > longest:
                longest = length
        return unbroken_blocks(full, self.bits, hashes, longest, limit) if self.has_holes else longest


def _lengths(led: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Leading blocks whose attention is held, by bit."""
    lengths: dict[int, int] = {}
    for length, bits in led:
        while bits:
            bit = bits & -bits
            lengths[bit] = length
            bits ^= bit
    return lengths


_Bits = tuple[str, _Media, _Media | None]  # a node's, and those of what others can be sent, where not all can be


class _Known(NamedTuple):
    """The nodes there are: those that can be asked together, each by its bit for memory, and those that cannot."""

    names: Mapping[int, str]
    nodes: int  # all of `names`
    engines: int  # those of them with an engine's cache
    everybody: Sequence[_Bits]
    others: Sequence[_Bits]  # not in `names`: with an SSD, or with bits from here and there
    bits: int  # of everybody
    closed: int  # those of prefix-closed media

    @classmethod
    def of(cls, media_of: Mapping[str, Mapping[Medium, int]]) -> Self:
        names: dict[int, str] = {}
        engines = bits = closed = 0
        everybody: list[_Bits] = []
        others: list[_Bits] = []
        for node_id, media in media_of.items():
            all_of_it = _Media.of(media)
            bits |= all_of_it.bits
            closed |= sum(all_of_it.closed)
            memory, engine = media.get(Medium.MEMORY, 0), media.get(Medium.ENGINE, 0)
            low = memory or engine >> PLANE
            movable = _Media.of({each: media[each] for each in MOVABLE if each in media}) if engine else None
            everybody.append((node_id, all_of_it, movable))
            if Medium.SSD in media or engine not in (0, low << PLANE):
                others.append(everybody[-1])
            else:
                names[low] = node_id
                engines |= low if engine else 0
        return cls(names, sum(names), engines, everybody, others, bits, closed)


class _Look:
    """One look at a prompt, in blocks."""

    def __init__(
        self,
        layout: ModelLayout,
        holders: Sequence[HolderSets],
        known: _Known,
        hashes: Sequence[bytes],
        num_tokens: int,
    ) -> None:
        self._size = layout.block_size
        self._hashes = hashes
        self._limit = min(num_tokens // layout.block_size, len(hashes))
        self._full = [holders[group] for group in layout.full_groups]
        states = [holders[group] for group in layout.state_groups]
        self._snapshots = SnapshotLengths(states, hashes, known.bits) if states else None
        self._led = list(leading_blocks(self._full, known.closed, hashes, self._limit)) if known.closed else []

    def sets(self, nodes: int, engines: int) -> list[tuple[int, Holding]]:
        """What each of `nodes` holds, those that hold as much together; of `engines`, their engine's cache may hold more."""
        found: list[tuple[int, Holding]] = []
        snapshots, size = self._snapshots, self._size
        self._led.sort(reverse=True)
        for length, bits in self._led:
            some = (bits | bits >> PLANE) & nodes
            if not some:
                continue
            nodes ^= some  # whatever its other medium holds is shorter
            agreeing = ((length, some),) if snapshots is None else snapshots.split(some, length, PLANE)
            for agreed, these in agreeing:
                hit = PrefixHit(agreed * size, length * size)
                if without := these & ~engines:
                    found.append((without, Holding(hit, agreed * size)))
                if cached := these & engines:
                    found += [(those, Holding(hit, movable * size)) for movable, those in self._movable(cached, agreed)]
        return found

    def _movable(self, nodes: int, agreed: int) -> list[tuple[int, int]]:
        """(length, nodes): what of `agreed` blocks each of `nodes` has in memory."""
        found: list[tuple[int, int]] = []
        for length, bits in self._led:
            if some := bits & nodes:
                nodes ^= some
                limit = min(agreed, length)
                found += ((limit, some),) if self._snapshots is None else self._snapshots.split(some, limit)
        return [*found, (0, nodes)] if nodes else found

    @property
    def num_lengths(self) -> int:
        """How many different lengths of attention there are."""
        return len(self._led)

    def each(self, nodes: Sequence[_Bits]) -> dict[str, Holding]:
        """What each of some nodes holds, for any bits."""
        found: dict[str, Holding] = {}
        full, hashes, limit, size = self._full, self._hashes, self._limit, self._size
        lengths = _lengths(self._led)
        longest = self._snapshots.longest if self._snapshots is not None else _any_length
        for node_id, media, movable in nodes:
            attention = media.attention(full, lengths, hashes, limit)
            agreed = others = longest(media.bits, attention) if attention else 0
            if agreed and movable is not None:
                others = longest(movable.bits, min(agreed, movable.attention(full, lengths, hashes, limit)))
            found[node_id] = Holding(PrefixHit(agreed * size, attention * size), others * size)
        return found


def _any_length(bits: int, limit: int) -> int:
    """A model without states can continue from every length."""
    return limit


def _lowest_free(used: int) -> int:
    """The lowest bit for a node's memory that is free, and the one for its engine's cache with it."""
    taken = used | used >> PLANE
    pairs = taken.bit_length() // (2 * PLANE) + 2  # of planes, with a free one at the end
    free = ~taken & int.from_bytes((b"\xff" * (PLANE // 8) + bytes(PLANE // 8)) * pairs, "little")
    return free & -free


def bits_of(bits: int) -> Iterator[int]:
    """Each bit alone, the lowest first."""
    while bits:
        yield bits & -bits
        bits &= bits - 1


def _how_many(some: tuple[int, Holding]) -> int:
    return some[0].bit_count()


class _HeldBy:
    """The blocks of one group that one node holds in any of its media."""

    __slots__ = ("bits", "holders")

    def __init__(self, holders: HolderSets, bits: int) -> None:
        self.holders = holders
        self.bits = bits

    def __contains__(self, block_hash: object) -> bool:
        return bool(self.holders.get(block_hash) & self.bits)  # type: ignore[arg-type]
