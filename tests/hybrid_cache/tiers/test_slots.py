"""Sealed slots: no block can be read on disk, and one that is not what was written there is a miss with a reason."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.files import Buffer, FileDisk
from hybrid_cache.tiers.slots import (
    ABOUT,
    BOOT_BYTES,
    CORRUPT,
    HEADER_BYTES,
    NUMBER,
    PART_BYTES,
    SEALED,
    TAG_BYTES,
    UNAUTHENTIC,
    CheckedSlots,
    SealedSlots,
    SlotBlock,
    SlotFormat,
)
from tests.hybrid_cache.tiers.test_disk import CAPACITY, LAYOUT, content, key, read

SECRET, OTHER = b"s" * 32, b"o" * 32
KEYS = [key(1), key(2), key(3, group=1)]


def sealed(secret: bytes = SECRET, layout: str = LAYOUT.fingerprint) -> SealedSlots:
    return SealedSlots(secret, layout)


def opened(folder: Path, slots: SlotFormat | None) -> DiskTier:
    return DiskTier(LAYOUT, FileDisk(folder), capacity_bytes=CAPACITY, slots=slots)


def fill(folder: Path, slots: SlotFormat | None) -> None:
    with opened(folder, slots) as tier:
        assert all(tier.put(each, [content(each)]) for each in KEYS)


class Written:
    """A slot as it lies on disk."""

    def __init__(self, slots: SlotFormat, block: SlotBlock, data: bytes) -> None:
        self.bytes = bytearray(len(data))
        self.parts: list[int] = []
        self.header = bytearray(slots.write(block, [memoryview(data)], self._put))

    def _put(self, at: int, parts: Sequence[Buffer]) -> None:
        for part in map(bytes, parts):
            self.bytes[at : at + len(part)] = part
            self.parts.append(len(part))
            at += len(part)

    def read(self, slots: SlotFormat) -> str | bytes:
        """Its bytes, or why it has no use."""
        data = bytearray(self.bytes)
        return slots.opened(self.header, [memoryview(data)[:100], memoryview(data)[100:]]) or bytes(data)


BLOCK = SlotBlock(0, 3 * PART_BYTES + 5, b"h" * 32)
DATA = np.random.default_rng(0).bytes(BLOCK.length)


def test_a_block_outlives_the_tier_under_the_same_secret_and_under_no_other(tmp_path: Path) -> None:
    fill(tmp_path, sealed())
    with opened(tmp_path, sealed()) as tier:
        assert tier.report().recovered == len(KEYS)
        assert [read(tier, each) for each in KEYS] == [content(each) for each in KEYS]
    with opened(tmp_path, sealed(OTHER)) as tier:
        assert [read(tier, each) for each in KEYS] == [None] * len(KEYS)
        assert tier.report().unauthentic == 0  # they are not even looked at
    assert not sum(file.stat().st_size for file in tmp_path.glob(f"*{sealed().file_part}.kv"))


@pytest.mark.parametrize(("before", "after"), [(None, sealed()), (sealed(), None)])
def test_a_tier_that_changes_its_format_leaves_no_block_of_the_other_behind(
    tmp_path: Path, before: SlotFormat | None, after: SlotFormat | None
) -> None:
    fill(tmp_path, before)
    before_files = {file.name for file in tmp_path.glob("*.kv*")}
    with opened(tmp_path, after) as tier:
        assert tier.report().recovered == 0
    assert not before_files & {file.name for file in tmp_path.iterdir()}


def test_nothing_of_a_block_is_on_disk_as_it_is(tmp_path: Path) -> None:
    fill(tmp_path / "plain", None)
    fill(tmp_path / "sealed", sealed())
    pieces = [content(each)[at : at + 8] for each in KEYS for at in (0, 100, 200)]
    plain, secret = (
        b"".join(file.read_bytes() for file in (tmp_path / folder).iterdir()) for folder in ("plain", "sealed")
    )
    assert all(piece in plain for piece in pieces)
    assert not any(piece in secret for piece in pieces)


def test_blocks_of_any_length_come_back_in_parts_that_let_others_run() -> None:
    written = Written(sealed(), BLOCK, DATA)
    assert written.read(sealed()) == DATA
    assert bytes(written.bytes) != DATA
    assert max(written.parts) == PART_BYTES
    empty = Written(sealed(), SlotBlock(0, 0, b"h" * 32), b"")
    assert empty.read(sealed()) == b""


@pytest.mark.parametrize("at", [0, PART_BYTES, BLOCK.length - 1])
def test_a_changed_byte_of_the_block_does_not_open(at: int) -> None:
    written = Written(sealed(), BLOCK, DATA)
    written.bytes[at] ^= 1
    assert written.read(sealed()) == UNAUTHENTIC
    plain = Written(CheckedSlots(), BLOCK, DATA)
    plain.bytes[at] ^= 1
    assert plain.read(CheckedSlots()) == CORRUPT


def test_a_header_that_was_made_for_other_bytes_does_not_open_them() -> None:
    """Its own checksum is no secret: it finds faults, and the tag what was forged."""
    slots = sealed()
    first, second = Written(slots, BLOCK, DATA), Written(slots, BLOCK, DATA)
    assert first.bytes != second.bytes  # no nonce comes twice
    first.header = second.header
    assert first.read(slots) == UNAUTHENTIC
    renamed, meant = Written(slots, BLOCK, DATA), SlotBlock(BLOCK.group, BLOCK.length, b"x" * 32)
    renamed.header = bytearray(_rewritten(renamed.header, meant))
    assert slots.listed(renamed.header) == meant
    assert renamed.read(slots) == UNAUTHENTIC


def _rewritten(header: bytes, block: SlotBlock) -> bytes:
    """The header as someone without the secret would make it for another block."""
    said = ABOUT.pack(SEALED, *block) + header[ABOUT.size : ABOUT.size + TAG_BYTES + BOOT_BYTES + NUMBER.size]
    return (said + xxhash.xxh3_64_digest(said)).ljust(HEADER_BYTES, b"\0")


@pytest.mark.parametrize("slots", [sealed(OTHER), sealed(layout="another layout")])
def test_another_secret_or_layout_does_not_open_a_slot(slots: SealedSlots) -> None:
    assert Written(sealed(), BLOCK, DATA).read(slots) == UNAUTHENTIC


def test_a_torn_header_is_listed_by_neither_format() -> None:
    for slots in (sealed(), CheckedSlots()):
        written = Written(slots, BLOCK, DATA)
        assert slots.listed(written.header) == BLOCK
        written.header[50] ^= 1
        assert slots.listed(written.header) is None
        assert slots.listed(bytes(HEADER_BYTES)) is None
    assert sealed().listed(Written(CheckedSlots(), BLOCK, DATA).header) is None


def test_no_two_writings_share_key_and_nonce() -> None:
    """The opening of the tier makes the key, the number of the writing the nonce."""
    boots = [sealed() for _ in range(3)]
    said = [
        bytes(Written(each, SlotBlock(0, 1, BLOCK.block_hash), b"x").header[64:88]) for each in boots for _ in range(4)
    ]
    assert len(set(said)) == len(said) == 12


def test_damage_in_a_tier_is_a_miss_and_counted_by_its_reason(tmp_path: Path) -> None:
    fill(tmp_path, sealed())
    (file,) = tmp_path.glob("*-1.*.kv")
    data = bytearray(file.read_bytes())
    data[HEADER_BYTES + 9] ^= 1
    file.write_bytes(data)
    with opened(tmp_path, sealed()) as tier:
        assert read(tier, KEYS[2]) is None
        report = tier.report()
        assert (report.unauthentic, report.corrupt, report.misses) == (1, 0, 0)
        assert KEYS[2] not in tier
        assert read(tier, KEYS[0]) == content(KEYS[0])
