"""Memory over disk: evicted blocks are written behind, and a request's blocks are read back before it starts.

A promotion is a landing whose bytes come from disk: pages are reserved, filled, committed and released like those of a
transfer, so a block that proves damaged half-way is never matched.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hybrid_cache.cache.blocks import Pages
from hybrid_cache.cache.lookup import PrefixHit, longest_common_hit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.errors import OutOfPages, UnchainedHashes
from hybrid_cache.layout.layout import ByteRange, ModelLayout
from hybrid_cache.tiers.disk import BlockKey, DiskTier

Views = Callable[[Sequence[ByteRange]], list[memoryview]]


@dataclass(frozen=True, slots=True)
class Promotion:
    """Blocks to read from disk into reserved pages. A long prompt has many: they are listed by the thread that reads."""

    request_id: str
    num_tokens: int
    hashes: Sequence[bytes]
    reservation: Reservation
    layout: ModelLayout

    def blocks(self) -> Iterator[tuple[BlockKey, tuple[ByteRange, ...]]]:
        """Each key with the arena segments of its layers, in order."""
        for group, hashes, pages in self._parts():
            for block_hash, each in zip(hashes, pages, strict=True):
                if each:
                    yield BlockKey(group, block_hash), self.layout.block_segments(group, each)

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(self.layout.block_bytes(group) * sum(map(bool, pages)) for group, _, pages in self._parts())

    def _parts(self) -> Iterator[tuple[int, Sequence[bytes], Sequence[Pages]]]:
        """Of each group, hashes and pages of blocks; no pages: such a block is not read."""
        reservation, block_size = self.reservation, self.layout.block_size
        first, stop = reservation.cached_tokens // block_size, reservation.num_tokens // block_size
        for group in range(len(self.layout.groups)):
            if group not in self.layout.state_groups:
                begin = 0 if group in self.layout.window_groups else first
                yield group, self.hashes[begin:stop], reservation.blocks[group][begin:stop]
            for pages in reservation.states[group].values():
                yield group, self.hashes[stop - 1 : stop], (pages,)


class Tiers:
    """A prefix cache, the disk below it and the arena both move bytes through.

    `demote` and `read` may run in threads; everything else belongs to the cache's owner.
    """

    def __init__(self, cache: PrefixCache, disk: DiskTier, views: Views) -> None:
        self.cache = cache
        self.disk = disk
        self._views = views
        cache.on_evict = self.demote

    def demote(self, group: int, block_hash: bytes, pages: Sequence[int]) -> None:
        """Copies a block that is about to leave memory into the disk's queue."""
        key = BlockKey(group, block_hash)
        if key not in self.disk:
            self.disk.put(key, self._views(self.cache.layout.block_segments(group, pages)))

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """As `PrefixCache.match`, the disk included."""
        held = tuple(_Either(self, group, hashes) for group in range(len(self.cache.layout.groups)))
        return longest_common_hit(self.cache.layout, held, hashes, num_tokens)

    def gain(self, hashes: Sequence[bytes], num_tokens: int, *, attention_only: bool = False) -> tuple[int, int]:
        """Tokens of a prompt that are cached, and that would be with what the disk adds."""
        both, memory = self.match(hashes, num_tokens), self.cache.match(hashes, num_tokens)
        if attention_only:
            return memory.attention_tokens, both.attention_tokens
        return memory.num_tokens, both.num_tokens

    def plan_promotion(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        *,
        now: float,
        attention_only: bool = False,
    ) -> Promotion | None:
        """Reserves pages for what the disk adds to a prompt's hit. None if it adds nothing or there is no room.

        Call it for requests that wait in a queue as well: then their prefixes are there when their turn comes.
        `attention_only` leaves out states and windows, for a landing: they will arrive with it.
        """
        have, length = self.gain(hashes, num_tokens, attention_only=attention_only)
        if length <= have:
            return None
        purpose = Purpose.ATTENTION if attention_only else Purpose.PROMOTION
        try:
            reservation = self.cache.reserve(request_id, hashes, length, now=now, purpose=purpose)
        except (OutOfPages, UnchainedHashes):
            return None
        try:
            self._complete_windows(reservation, hashes)
            return Promotion(request_id, length, hashes, reservation, self.cache.layout)
        except BaseException:
            self.cache.release(request_id, now)
            raise

    def read(self, promotion: Promotion) -> bool:
        """Reads the blocks, in a thread if the caller likes; False at the first one that is missing or damaged."""
        return all(self.disk.get(key, self._views(segments)) for key, segments in promotion.blocks())

    def finish(self, promotion: Promotion, ok: bool, now: float) -> None:
        """Ends a promotion: all blocks read become part of the prefix cache, or none does."""
        try:
            if ok:
                self.cache.commit(promotion.request_id, promotion.num_tokens, now)
        finally:
            self.cache.release(promotion.request_id, now)

    def _complete_windows(self, reservation: Reservation, hashes: Sequence[bytes]) -> None:
        # A promotion has all its windows in pages of its own; those that are still in memory are read back like the rest.
        # They are copied as evicted blocks are: the next holder of their pages waits for that.
        leave = self.cache.on_evict or self.demote
        for group in self.cache.layout.window_groups:
            for index, pages in enumerate(reservation.blocks[group]):
                if pages and (held := self.cache.pages_of(group, hashes[index])):
                    leave(group, hashes[index], held)


class _Either:
    """Hashes of a group in memory or on disk. Of full attention only an unbroken prefix counts; the disk may have holes."""

    def __init__(self, tiers: Tiers, group: int, hashes: Sequence[bytes]) -> None:
        memory = tiers.cache.held(group)
        on_disk = tiers.disk.holds(group, hashes)
        known = [block_hash in memory or block_hash in on_disk for block_hash in hashes]
        if group in tiers.cache.layout.full_groups:
            known = known[: known.index(False)] if False in known else known
        self._hashes = {block_hash for block_hash, there in zip(hashes, known, strict=False) if there}

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._hashes
