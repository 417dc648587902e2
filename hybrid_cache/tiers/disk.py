"""The SSD tier: blocks that left memory, checked whenever they come back.

One file per group, cut into slots of equal size; a slot is a header and a block's bytes (`hybrid_cache.tiers.slots`).

A slot is written header last, after its old header was wiped. After a crash, each slot with a valid header is listed again; its
bytes are believed only if they are found sound at the time they are read. So a torn, stale, rotten or forged block costs a miss.

The order of use is saved at close, and now and then before, in two files in turn. They have the last bytes of the
hashes in order. A torn file loses a little of the order, never a block. Blocks that the saved order does not know have
come since.

Writes go through a bounded queue to one thread; when it is full, the block is not kept. Reads are synchronous: call them where
waiting for a disk is fine.
"""

import logging
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np

from hybrid_cache.cache.events import BlocksStored, CacheCleared, CacheEvent, EventLog, Medium
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.tiers.files import Buffer, Disk
from hybrid_cache.tiers.slot_table import TAIL_BYTES, SlotTable
from hybrid_cache.tiers.slots import CORRUPT, HEADER_BYTES, CheckedSlots, SlotBlock, SlotFormat, checksum

log = logging.getLogger(__name__)

ORDER_MAGIC: Final = b"pfLR"
ORDER: Final = struct.Struct("<4sQQ16s")  # magic, number of the save, number of blocks, checksum of what follows
PIECE_BYTES: Final = 1 << 20  # copied, hashed and freed at once: other threads run in between
EVENT_LIMIT: Final = 1 << 20  # hashes kept for an absent reader
PART_HASHES: Final = 2048  # of a snapshot, at once


class BlockKey(NamedTuple):
    """A block or snapshot of a group by the hash of its prefix."""

    group: int
    block_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """Counts since the start. Blocks that were `corrupt` or, if sealed, `unauthentic` were dropped, and none was served."""

    capacity_bytes: int
    blocks: int
    bytes: int
    queued_bytes: int
    hits: int
    misses: int
    corrupt: int
    unauthentic: int
    read_errors: int
    write_errors: int
    refused_writes: int
    recovered: int


class DiskTier:
    """Blocks of one layout on disk, the least recently used overwritten first. Thread-safe."""

    def __init__(
        self,
        layout: ModelLayout,
        disk: Disk,
        *,
        capacity_bytes: int,
        queue_bytes: int = 256 << 20,
        slots: SlotFormat | None = None,
    ) -> None:
        """Lists what is there; files of other layouts and formats, or beyond the capacity, are removed. Raises OSError."""
        self.layout = layout
        self.queue_bytes: Final = queue_bytes
        self._disk = disk
        share = capacity_bytes // len(layout.groups)
        self._slots = [_slots_within(layout, group, share, queue_bytes) for group in range(len(layout.groups))]
        self._format = slots or CheckedSlots()
        # Another layout's blocks, or those of another secret, are other files: nothing is ever read across.
        part = self._format.file_part
        self._names = [f"{layout.fingerprint[:24]}-{group}{part}.kv" for group in range(len(layout.groups))]
        if freed := disk.keep(_most_bytes(layout, self._names, self._slots)):
            log.info("removed %d bytes of other layouts or keys, or beyond %d bytes for each group", freed, share)
        self._tables = [SlotTable(slots) for slots in self._slots]
        self._pending: dict[BlockKey, list[memoryview]] = {}
        self._queue: deque[BlockKey] = deque()
        self._queued_bytes = 0
        self._counts = dict.fromkeys(
            ("hits", "misses", "corrupt", "unauthentic", "read_errors", "write_errors", "refused_writes", "recovered"),
            0,
        )
        self._events = EventLog(EVENT_LIMIT, Medium.SSD)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._closing = False
        self._ended = False  # the writer
        self._left_alone = False  # by a close that could wait no longer
        self._uses = 0  # since the order was saved
        self._save_every = max(1024, sum(self._slots) // 8)
        self._saves = 0
        for group in range(len(layout.groups)):
            self._recover(group)
        self._writer = threading.Thread(target=self._write_queue, name="disk-tier", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __contains__(self, key: BlockKey) -> bool:
        with self._lock:
            return key in self._pending or key.block_hash in self._tables[key.group]

    def hashes(self, group: int) -> tuple[bytes, ...]:
        """What can probably be read, the least recently used first."""
        with self._lock:
            return (*self._tables[group], *(key.block_hash for key in self._pending if key.group == group))

    def holds(self, group: int, hashes: Sequence[bytes]) -> set[bytes]:
        """Which of `hashes` can probably be read."""
        with self._lock:
            table, pending = self._tables[group], self._pending
            return {h for h in hashes if h in table or (pending and BlockKey(group, h) in pending)}

    def snapshot(self, most_hashes: int = PART_HASHES) -> Iterator[BlocksStored]:
        """What can probably be read, in parts, each as of when it is asked for. What changes meanwhile, `take_events` tells."""
        for group, table in enumerate(self._tables):
            with self._lock:  # first: their slots may be among those that were read
                some = [key.block_hash for key in self._pending if key.group == group]
            start = 0
            while some or start < table.num_taken:
                if some:
                    yield BlocksStored(group, tuple(some), Medium.SSD)
                with self._lock:
                    some = table.blocks_in(start, start + most_hashes)
                start += most_hashes
            if some:
                yield BlocksStored(group, tuple(some), Medium.SSD)

    def take_events(self) -> list[CacheEvent]:
        """Changes since the last call, or since the start. A reader that comes too late gets a snapshot instead."""
        with self._lock:
            events = self._events.take()
        return [CacheCleared(Medium.SSD), *self.snapshot()] if events is None else events

    def put(self, key: BlockKey, parts: Sequence[Buffer]) -> bool:
        """Queues a copy of a block's bytes for writing; False if it is there already or the queue is full."""
        size = sum(memoryview(part).nbytes for part in parts)
        if size != self.layout.block_bytes(key.group):
            raise ValueError(f"a block of group {key.group} has {self.layout.block_bytes(key.group)} bytes, not {size}")
        with self._lock:
            if not self._takes(key, size):
                return False
        data = _copied(parts, size)  # not under the lock: it is as long as the block
        with self._lock:
            if not self._takes(key, size):  # another thread may have been faster
                return False
            self._queued_bytes += size
            self._pending[key] = data
            self._queue.append(key)
            self._events.stored(key.group, (key.block_hash,))
            self._work.notify()
        return True

    def _takes(self, key: BlockKey, size: int) -> bool:
        """Whether a block may be queued; blocks without room are counted. The caller holds the lock."""
        if key in self._pending or key.block_hash in self._tables[key.group]:
            return False
        room = self._queued_bytes + size <= self.queue_bytes and self._slots[key.group]
        if self._closing or self._ended or not room:
            self._counts["refused_writes"] += 1
            return False
        return True

    def get(self, key: BlockKey, into: Sequence[memoryview]) -> bool:
        """Reads a block. False: not there, or damaged; then what is in `into` means nothing."""
        with self._lock:
            pending = list(self._pending.get(key, ()))
            slot = self._tables[key.group].slot_of(key.block_hash)
            if not pending and slot is None:
                self._counts["misses"] += 1
                return False
        if pending:
            _move(pending, into)
            return self._count("hits", True)
        assert slot is not None
        header = bytearray(HEADER_BYTES)
        try:
            size = HEADER_BYTES + self.layout.block_bytes(key.group)
            got = self._disk.read(
                self._names[key.group], slot * self._slot_bytes(key.group), [memoryview(header), *into]
            )
        except OSError:
            self._forget(key, slot)
            return self._count("read_errors", False)
        wrong = CORRUPT
        if got >= size and self._listed(key.group, header) == key.block_hash:
            wrong = self._format.opened(header, into)
        if wrong:
            return self._count(wrong if self._forget(key, slot) else "misses", False)
        with self._lock:
            if self._tables[key.group].slot_of(key.block_hash) == slot:
                self._tables[key.group].used(key.block_hash)
                self._uses += 1
        return self._count("hits", True)

    def drop(self, key: BlockKey) -> None:
        """Forgets a block; after a restart it may be listed again."""
        with self._lock:
            slot = self._tables[key.group].slot_of(key.block_hash)
        if slot is not None:
            self._forget(key, slot)

    def flush(self) -> None:
        """Waits until the queue is written, or its writer is gone."""
        with self._lock:
            while self._pending and not self._ended:
                self._idle.wait()

    def close(self, timeout_s: float | None = None) -> bool:
        """Writes the queue and the order of use, ends the writer and lets go of the disk.

        False if the disk has not let it within that time. What is queued is lost then, and the writer lets go of the
        disk by itself, should that ever answer.
        """
        with self._lock:
            self._closing = True
            self._work.notify()
        self._writer.join(timeout_s)
        with self._lock:
            if not self._ended:
                self._left_alone = True
                self._queue.clear()
                return False
        self._disk.close()
        return True

    def report(self) -> DiskReport:
        with self._lock:
            return DiskReport(
                capacity_bytes=sum(slots * self.layout.block_bytes(group) for group, slots in enumerate(self._slots)),
                blocks=sum(map(len, self._tables)),
                bytes=sum(len(held) * self.layout.block_bytes(group) for group, held in enumerate(self._tables)),
                queued_bytes=self._queued_bytes,
                **self._counts,
            )

    # Slots

    def _slot_bytes(self, group: int) -> int:
        return _slot_bytes(self.layout.block_bytes(group))

    def _recover(self, group: int) -> None:
        """Lists the slots with a valid header, the least recently used first."""
        name, size = self._names[group], self._slot_bytes(group)
        try:
            # The last slot may lack its padding, which was not written.
            count = min(self._slots[group], -(-self._disk.size(name) // size))
        except OSError:
            self._counts["read_errors"] += 1
            count = 0
        blocks: list[bytes | None] = []
        for slot in range(count):
            header = bytearray(HEADER_BYTES)
            try:
                self._disk.read(name, slot * size, [memoryview(header)])
            except OSError:
                self._counts["read_errors"] += 1
            blocks.append(self._listed(group, header))
        self._counts["recovered"] += self._tables[group].recover(blocks, self._load_order(group))

    def _listed(self, group: int, header: bytearray) -> bytes | None:
        block = self._format.listed(header)
        its_own = block is not None and block[:2] == (group, self.layout.block_bytes(group))
        return block.block_hash if block is not None and its_own else None

    def _forget(self, key: BlockKey, slot: int) -> bool:
        """Drops a block from the index unless its slot has been given to another since."""
        with self._lock:
            if self._tables[key.group].slot_of(key.block_hash) != slot:
                return False
            self._tables[key.group].forget(key.block_hash)
            self._events.removed(key.group, (key.block_hash,))
            return True

    def _count(self, name: str, result: bool) -> bool:
        with self._lock:
            self._counts[name] += 1
        return result

    # The order of use

    def _load_order(self, group: int) -> bytes:
        """The latest order that was saved whole."""
        saved = [self._read_order(f"{self._names[group]}.lru{turn}", self._slots[group]) for turn in (0, 1)]
        number, hashes = max(saved)
        self._saves = max(self._saves, number)
        return hashes

    def _read_order(self, name: str, most: int) -> tuple[int, bytes]:
        """Number and hashes of a saved order. One of more blocks than there are slots, of a larger tier, counts as torn."""
        header = bytearray(ORDER.size)
        try:
            size = self._disk.size(name)
            self._disk.read(name, 0, [memoryview(header)])
            magic, number, count, check = ORDER.unpack_from(header)
            if magic != ORDER_MAGIC or count > most or ORDER.size + count * TAIL_BYTES > size:
                return 0, b""
            hashes = bytearray(count * TAIL_BYTES)
            self._disk.read(name, ORDER.size, [memoryview(hashes)])
        except OSError:
            self._counts["read_errors"] += 1
            return 0, b""
        return (number, bytes(hashes)) if check == checksum([number.to_bytes(8), hashes]) else (0, b"")

    def _save_order(self) -> None:
        self._saves += 1
        for group, name in enumerate(self._names):
            with self._lock:
                self._uses = 0
                uses = self._tables[group].uses()
            hashes = uses.order()
            header = ORDER.pack(
                ORDER_MAGIC, self._saves, len(hashes) // TAIL_BYTES, checksum([self._saves.to_bytes(8), hashes])
            )
            try:
                self._disk.write(f"{name}.lru{self._saves % 2}", 0, [header, hashes])
            except OSError:
                self._count("write_errors", False)

    # The writer's thread

    def _write_queue(self) -> None:
        try:
            while (key := self._next()) is not None:
                self._write_block(key)
                if self._uses >= self._save_every:
                    self._save_order()
            self._save_order()
        finally:
            with self._lock:
                self._ended = True
                self._idle.notify_all()
            if self._left_alone:
                self._disk.close()

    def _write_block(self, key: BlockKey) -> None:
        """Writes one block of the queue. On any error the block is lost and counted, and the tier goes on."""
        slot: int | None = None
        try:
            slot = self._take_slot(key.group)
            self._write(key, slot, self._pending[key])
        except OSError:  # a full or failing disk
            self._done(key, slot, written=False)
        except Exception:  # a bug: the other blocks are still to be written
            log.exception("a block of group %d was not written to disk", key.group)
            self._done(key, slot, written=False)
        else:
            self._done(key, slot, written=True)

    def _next(self) -> BlockKey | None:
        with self._lock:
            while not self._queue and not self._closing:
                self._work.wait()
            return self._queue.popleft() if self._queue else None

    def _take_slot(self, group: int) -> int:
        with self._lock:
            slot, block_hash = self._tables[group].take()
            if block_hash is not None:
                self._events.removed(group, (block_hash,))
            return slot

    def _write(self, key: BlockKey, slot: int, data: list[memoryview]) -> None:
        name, offset = self._names[key.group], slot * self._slot_bytes(key.group)

        def put(at: int, parts: Sequence[Buffer]) -> None:
            self._disk.write(name, offset + HEADER_BYTES + at, parts)

        self._disk.write(name, offset, [bytes(HEADER_BYTES)])
        block = SlotBlock(key.group, self.layout.block_bytes(key.group), key.block_hash)
        header = self._format.write(block, data, put)
        self._disk.write(name, offset, [header])

    def _done(self, key: BlockKey, slot: int | None, *, written: bool) -> None:
        with self._lock:
            data = self._pending.pop(key)
            self._queued_bytes -= self.layout.block_bytes(key.group)
            if written and slot is not None:
                self._tables[key.group].place(key.block_hash, slot)
                self._uses += 1
            else:
                self._counts["write_errors"] += 1
                if slot is not None:
                    self._tables[key.group].give_back(slot)
                self._events.removed(key.group, (key.block_hash,))
            if not self._pending:
                self._idle.notify_all()
        while data:
            data.pop()


def _slots_within(layout: ModelLayout, group: int, share: int, queue_bytes: int) -> int:
    """How many slots fit, with two orders of use beside them. None is said: what it means cannot be seen."""
    size = layout.block_bytes(group)
    slots = max(0, share - 2 * ORDER.size) // (_slot_bytes(size) + 2 * TAIL_BYTES)
    if not slots:
        log.error("no block of group %d is kept on disk: one has %d bytes, and its share is %d", group, size, share)
    elif size > queue_bytes:
        log.error("no block of group %d is kept on disk: one has %d bytes, the queue %d", group, size, queue_bytes)
    return slots


def _most_bytes(layout: ModelLayout, names: Sequence[str], slots: Sequence[int]) -> dict[str, int]:
    """A tier's files by name, and how long they may become."""
    most_bytes: dict[str, int] = {}
    for group, name in enumerate(names):
        most_bytes[name] = slots[group] * _slot_bytes(layout.block_bytes(group))
        most_bytes |= {f"{name}.lru{turn}": ORDER.size + slots[group] * TAIL_BYTES for turn in (0, 1)}
    return most_bytes


def _slot_bytes(block_bytes: int) -> int:
    return HEADER_BYTES + -(-block_bytes // HEADER_BYTES) * HEADER_BYTES


def _copied(parts: Sequence[Buffer], size: int) -> list[memoryview]:
    """The bytes of `parts` in pieces of their own."""
    made = [np.empty(min(PIECE_BYTES, size - at), np.uint8).data for at in range(0, size, PIECE_BYTES)]
    _copy(parts, made)
    return made


def _move(pieces: list[memoryview], into: Sequence[memoryview]) -> None:
    """Copies pieces, and frees each of them."""
    _copy(pieces, into)
    while pieces:
        pieces.pop()


def _copy(sources: Sequence[Buffer], targets: Sequence[memoryview]) -> None:
    """Copies bytes piece by piece. numpy lets other threads run meanwhile, a memoryview would not."""
    ends = iter(targets)
    target, at = np.empty(0, np.uint8), 0
    for source in sources:
        data = np.frombuffer(source, np.uint8)
        while data.size:
            if at == target.size:
                target, at = np.frombuffer(next(ends), np.uint8), 0
            size = min(data.size, target.size - at, PIECE_BYTES)
            target[at : at + size] = data[:size]
            data, at = data[size:], at + size
