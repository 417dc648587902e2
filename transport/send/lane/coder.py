"""Codes the chunks of one lane: what leaves smaller lies in the lane's own memory, at most one batch of it."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from transport.coding.budget import CodingBudget
from transport.coding.choice import Chooser, CodecAccounts, FormatOf, RangeFormat, Situation
from transport.coding.codec import ChunkEncoder, ChunkPart, Codec, CodedPart, parts_of
from transport.path.shm import advance
from transport.send.schedule.lanes import LaneTransfer

MIN_CODED_BYTES: Final = 4 << 10  # a smaller chunk is not worth it
MAX_RATIO: Final = 0.98  # a chunk that stays larger leaves as it is: the receiver need not decode it


class PeerCoding:
    """What all lanes of one peer have learnt about coding. `lock` is that of the peer's transfers."""

    def __init__(self, lock: threading.Lock, budget: CodingBudget) -> None:
        """`budget` is that of all peers."""
        self._lock = lock
        self._budget = budget
        self._chooser = Chooser()

    @property
    def active(self) -> bool:
        """Whether there was ever anything to choose."""
        return self._chooser.active

    @property
    def cpu_s(self) -> float:
        """Processor time that was spent on it."""
        return self._chooser.accounts.cpu_s

    def accounts(self) -> CodecAccounts:
        """A copy."""
        accounts = CodecAccounts()
        with self._lock:
            accounts.merge(self._chooser.accounts)
        return accounts

    def asked(self, formats: Mapping[str, RangeFormat], taken: Codec, now: float) -> dict[str, Codec]:
        """The codec for ranges of each label now; `taken` is what the receiver decodes."""
        choices = {label: found.policy.choices(taken) for label, found in formats.items()}
        on_idle_link = {label: codecs[0] for label, codecs in choices.items()}
        with self._lock:
            asked = {label: self._chooser.codec_of(label, codecs) for label, codecs in choices.items()}
            if asked == on_idle_link or self._budget.is_left(now):
                return asked
            self._chooser.accounts.events["no_core_left"] += 1
        return on_idle_link

    def on_coded(
        self,
        transfer: LaneTransfer,
        asked: Mapping[str, Codec],
        shares: Sequence[CodedPart],
        cpu_s: float,
        sent: int,
        now: float,
    ) -> None:
        """A chunk of `transfer` was coded, and leaves as `sent` bytes."""
        plain = sum(share.plain_bytes for share in shares)
        with self._lock:
            self._budget.charge(cpu_s, now, is_owed=not self._chooser.is_as_idle(asked))
            self._chooser.on_coded(asked, shares, cpu_s, now)
            transfer.outbox.bytes_saved += plain - sent
            for share in shares:
                transfer.outbox.bytes_by_codec[share.codec.label] += share.plain_bytes

    def on_situation(self, situation: Situation, now: float) -> None:
        """With the lock held."""
        self._chooser.on_situation(situation, now)

    def refused(self) -> None:
        """The receiver takes nothing coded, after all."""
        with self._lock:
            self._chooser.accounts.events["refused_by_peer"] += 1


class LaneCoder:
    """Belongs to its lane's thread; its measurements go to the peer, for all lanes."""

    def __init__(self, coding: PeerCoding, chunk_bytes: int) -> None:
        self._coding = coding
        self._chunk_bytes = chunk_bytes
        self._encoder: ChunkEncoder | None = None  # made when first needed
        self._room = memoryview(b"")
        self._used = 0
        self.bytes_saved = 0  # in this batch

    def begin_batch(self) -> None:
        self._used = self.bytes_saved = 0

    def code(
        self, transfer: LaneTransfer, formats: FormatOf, taken: int, start: int, stop: int, views: Sequence[memoryview]
    ) -> memoryview | None:
        """The chunk `[start, stop)`, which lies in `views`, made smaller; None when it is to leave as it is.

        What is returned holds until the next batch. `taken` is what the receiver decodes.
        """
        pieces = list(_pieces(transfer, formats, start, stop))
        asked = self._coding.asked({found.label: found for found, _, _ in pieces}, Codec(taken), time.monotonic())
        length = stop - start
        cpu_s, encoded = 0.0, None
        if any(asked.values()) and length >= MIN_CODED_BYTES:
            began = time.thread_time()
            encoded = self._encode(pieces, asked, views, length)
            cpu_s = time.thread_time() - began
        if encoded is None:
            shares = [CodedPart(found.label, Codec.RAW, size, size) for found, _, size in pieces]
            self._coding.on_coded(transfer, asked, shares, cpu_s, length, time.monotonic())
            return None
        size, coded_shares = encoded
        coded = self._room[self._used : self._used + size]
        self._used += size
        self.bytes_saved += length - size
        self._coding.on_coded(transfer, asked, coded_shares, cpu_s, size, time.monotonic())
        return coded

    def _encode(
        self,
        pieces: Sequence[tuple[RangeFormat, int, int]],
        asked: dict[str, Codec],
        views: Sequence[memoryview],
        length: int,
    ) -> tuple[int, tuple[CodedPart, ...]] | None:
        if self._encoder is None:
            self._encoder = ChunkEncoder()
            self._room = memoryview(bytearray(self._chunk_bytes))
        rest = list(views)
        parts = [part for piece in pieces for part in _parts(*piece, asked, rest)]
        out = self._room[self._used : self._used + int(length * MAX_RATIO)]
        return self._encoder.encode(parts, out)


def _pieces(transfer: LaneTransfer, formats: FormatOf, start: int, stop: int) -> Iterator[tuple[RangeFormat, int, int]]:
    """The chunk by ranges: what the range is, the first byte of it, how many."""
    for index, skip, size in transfer.manifest.pieces(start, stop):
        yield formats(index), skip, size


def _parts(
    found: RangeFormat, skip: int, size: int, asked: dict[str, Codec], rest: list[memoryview]
) -> Iterator[ChunkPart]:
    """The next `size` bytes of `rest`, which they are taken off, as parts of the runs that they belong to."""
    begin = 0
    for run in found.runs:
        first, last = max(skip, begin), min(skip + size, begin + run.num_bytes)
        if first < last:
            yield from parts_of(run, _take(rest, last - first), first - begin, asked[found.label], found.label)
        begin += run.num_bytes


def _take(rest: list[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of a list of views, which loses them."""
    taken: list[memoryview] = []
    for view in rest:
        if not size:
            break
        taken.append(view[:size])
        size -= len(taken[-1])
    advance(rest, sum(len(view) for view in taken))
    return taken
