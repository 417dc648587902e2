"""The disk tier: whatever happens to the process or the disk, nothing wrong is ever served."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybrid_cache.cache.events import BlocksStored, Medium
from hybrid_cache.errors import DiskInUse
from hybrid_cache.tiers.disk import ORDER, BlockKey, DiskTier
from hybrid_cache.tiers.files import Buffer, FileDisk
from tests.hybrid_cache.builders import FULL, STATE, make_layout
from tests.properties import examples

LAYOUT = make_layout(FULL, STATE)
CAPACITY = 13 * 1024
SLOTS = (16, 7)  # of 384 and 896 bytes, in half of the capacity each, and their orders of use


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(group, number.to_bytes(32))


def content(of: BlockKey, layout=LAYOUT) -> bytes:
    """What belongs under a key: nothing else may be served."""
    seed = int.from_bytes(of.block_hash[-4:]) * 8 + of.group
    return np.random.default_rng(seed).bytes(layout.block_bytes(of.group))


def read(tier: DiskTier, of: BlockKey) -> bytes | None:
    data = bytearray(LAYOUT.block_bytes(of.group))
    # In two parts, as pages are.
    views = [memoryview(data)[:100], memoryview(data)[100:]]
    return bytes(data) if tier.get(of, views) else None


def open_tier(disk, **options) -> DiskTier:
    return DiskTier(LAYOUT, disk, capacity_bytes=CAPACITY, **options)


def test_blocks_survive_a_restart(tmp_path):
    keys = [key(1), key(2), key(3, group=1)]
    with open_tier(FileDisk(tmp_path)) as tier:
        assert all(tier.put(k, [content(k)]) for k in keys)
        assert read(tier, keys[0]) == content(keys[0])  # from the queue or from disk
    with open_tier(FileDisk(tmp_path)) as tier:
        assert tier.report().recovered == 3
        assert [read(tier, k) for k in keys] == [content(k) for k in keys]
        assert read(tier, key(9)) is None


def test_least_recently_used_is_overwritten(tmp_path):
    with open_tier(FileDisk(tmp_path)) as tier:
        for number in range(SLOTS[0]):
            tier.put(key(number), [content(key(number))])
            tier.flush()
        assert read(tier, key(0)) is not None
        tier.put(key(99), [content(key(99))])
        tier.flush()
        assert read(tier, key(1)) is None
        assert read(tier, key(0)) == content(key(0))


def fill(tier: DiskTier) -> int:
    for number in range(SLOTS[0]):
        tier.put(key(number), [content(key(number))])
    tier.flush()
    return SLOTS[0]


def file_of(directory: Path, group: int, suffix: str = "") -> Path:
    return next(directory.glob(f"*-{group}.kv{suffix}"))


def test_order_of_use_survives_a_restart(tmp_path):
    with open_tier(FileDisk(tmp_path)) as tier:
        slots = fill(tier)
        assert read(tier, key(0)) is not None
    for newcomer in (100, 101):
        with open_tier(FileDisk(tmp_path)) as tier:
            tier.put(key(newcomer), [content(key(newcomer))])
    with open_tier(FileDisk(tmp_path)) as tier:
        kept = [key(n).block_hash for n in (*range(3, slots), 0, 100, 101)]
        assert list(tier.hashes(0)) == kept
        assert read(tier, key(0)) == content(key(0))


def test_torn_order_costs_the_order_only(tmp_path):
    with open_tier(FileDisk(tmp_path)) as tier:
        slots = fill(tier)
        assert read(tier, key(0)) is not None
    with open_tier(FileDisk(tmp_path)) as tier:
        assert read(tier, key(1)) is not None  # saved into the other file
    newest = file_of(tmp_path, 0, ".lru0")
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    with open_tier(FileDisk(tmp_path)) as tier:
        assert tier.hashes(0)[-1] == key(0).block_hash  # the order before
        assert all(read(tier, key(n)) == content(key(n)) for n in range(slots))
    for turn in (0, 1):
        file_of(tmp_path, 0, f".lru{turn}").write_bytes(b"pfLR")
    with open_tier(FileDisk(tmp_path)) as tier:
        assert len(tier.hashes(0)) == slots


def test_an_order_that_no_tier_of_this_size_saved_takes_no_memory(tmp_path):
    with open_tier(FileDisk(tmp_path)) as tier:
        slots = fill(tier)
    huge = 256 << 20
    for turn in (0, 1):
        order = file_of(tmp_path, 0, f".lru{turn}")
        order.write_bytes(ORDER.pack(b"pfLR", 9, huge // 8, bytes(16)))
        os.truncate(order, huge)
    tracemalloc.start()
    try:
        with open_tier(FileDisk(tmp_path)) as tier:
            assert len(tier.hashes(0)) == slots
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_order_is_saved_without_a_close():
    with open_tier(disk := FaultyDisk()) as tier:
        fill(tier)
        assert all(read(tier, key(0)) is not None for _ in range(1024))
        tier.put(key(99), [content(key(99))])
        tier.flush()
        files = dict(disk.files)
    assert any(name.endswith((".lru0", ".lru1")) for name in files)


def test_a_directory_has_one_user(tmp_path):
    with open_tier(FileDisk(tmp_path)):
        with pytest.raises(DiskInUse, match=str(tmp_path)):
            FileDisk(tmp_path)
        with subprocess.Popen(
            [sys.executable, "-c", OPENER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.communicate()[0] == "DiskInUse\n"
    FileDisk(tmp_path).close()


OPENER = """
import sys
from pathlib import Path
from hybrid_cache.tiers.files import FileDisk
try:
    FileDisk(Path(sys.argv[1]))
except Exception as exc:
    print(type(exc).__name__)
"""


def test_damage_is_noticed_counted_and_dropped(tmp_path):
    with open_tier(FileDisk(tmp_path)) as tier:
        tier.put(key(1), [content(key(1))])
    with file_of(tmp_path, 0).open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\x00\xff")
    with open_tier(FileDisk(tmp_path)) as tier:
        assert read(tier, key(1)) is None
        assert key(1) not in tier
        assert tier.report().corrupt == 1


def test_cut_off_file(tmp_path):
    with open_tier(FileDisk(tmp_path)) as tier:
        tier.put(key(1), [content(key(1))])
    os.truncate(file_of(tmp_path, 0), 150)
    with open_tier(FileDisk(tmp_path)) as tier:
        assert read(tier, key(1)) is None


def test_other_layouts_have_other_files(tmp_path):
    with open_tier(FileDisk(tmp_path)) as tier:
        tier.put(key(1), [content(key(1))])
    other = make_layout(FULL, STATE, layers=2)
    with DiskTier(other, FileDisk(tmp_path), capacity_bytes=CAPACITY) as tier:
        assert tier.hashes(0) == ()


def test_queue_is_bounded(tmp_path):
    with open_tier(FileDisk(tmp_path), queue_bytes=10) as tier:
        assert not tier.put(key(1), [content(key(1))])
        assert tier.report().refused_writes == 1
        with pytest.raises(ValueError, match="bytes"):
            tier.put(key(1), [b"short"])


class FaultyDisk:
    """A disk in memory that fails on demand and loses what a crash would lose."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.failing: set[str] = set()
        self.raising: BaseException | None = None
        self.torn_after: int | None = None  # bytes until the process "dies"

    def size(self, name: str) -> int:
        return len(self.files.setdefault(name, bytearray()))

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        if "read" in self.failing:
            raise OSError(errno.EIO, "injected")
        data, done = self.files.setdefault(name, bytearray()), 0
        for view in into:
            part = data[offset + done : offset + done + view.nbytes]
            view[: len(part)] = part
            done += len(part)
        return done

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        if self.raising is not None:
            raise self.raising
        if "write" in self.failing:
            raise OSError(errno.ENOSPC, "injected")
        data = b"".join(parts)
        if self.torn_after is not None:
            data, self.torn_after = data[: self.torn_after], max(0, self.torn_after - len(data))
        file = self.files.setdefault(name, bytearray())
        if data and len(file) < offset + len(data):
            file.extend(bytes(offset + len(data) - len(file)))
        file[offset : offset + len(data)] = data

    def keep(self, most_bytes: Mapping[str, int]) -> int:
        before = sum(map(len, self.files.values()))
        self.files = {name: data[: most_bytes[name]] for name, data in self.files.items() if name in most_bytes}
        return before - sum(map(len, self.files.values()))

    def close(self) -> None:
        pass


def test_two_that_put_one_block_at_once_queue_it_once():
    """Both pass the first look before either has queued it; the writer must survive that."""
    disk = FaultyDisk()
    copying = threading.Barrier(2)

    def parts():
        copying.wait(10.0)
        yield content(key(1))

    class Slow(list):
        """Parts whose copying (the second pass over them) begins when both threads are there."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            if self.passes == 2:
                return parts()
            return super().__iter__()

    with open_tier(disk) as tier:
        results: list[bool] = []
        threads = [
            threading.Thread(target=lambda: results.append(tier.put(key(1), Slow([content(key(1))]))), daemon=True)
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert sorted(results) == [False, True]
        assert flushed(tier)
        assert tier.put(key(2), [content(key(2))])
        assert flushed(tier)
        assert [read(tier, key(n)) for n in (1, 2)] == [content(key(1)), content(key(2))]
        assert tier.report().queued_bytes == 0


def flushed(tier: DiskTier) -> bool:
    """Whether `flush` comes to an end."""
    waiting = threading.Thread(target=tier.flush, daemon=True)
    waiting.start()
    waiting.join(30.0)
    return not waiting.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(errno.EIO, "injected")])
def test_a_writer_that_meets_an_error_counts_it_and_goes_on(error):
    disk = FaultyDisk()
    with open_tier(disk) as tier:
        disk.raising = error
        assert tier.put(key(1), [content(key(1))])
        assert flushed(tier)
        disk.raising = None
        assert tier.report().write_errors == 1
        assert read(tier, key(1)) is None
        assert tier.put(key(2), [content(key(2))])
        assert flushed(tier)
        assert read(tier, key(2)) == content(key(2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_flush_ends_when_the_writer_is_gone():
    disk = FaultyDisk()
    with open_tier(disk) as tier:
        disk.raising = KeyboardInterrupt()
        assert tier.put(key(1), [content(key(1))])
        assert flushed(tier)
        assert not tier.put(key(2), [content(key(2))])
        assert tier.report().refused_writes == 1


class DiskMachine(RuleBasedStateMachine):
    """Puts, gets, crashes in the middle of a write, rot, full disk and read errors; only true contents may come back."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk()
        self.tier = open_tier(self.disk)
        self.heard: set[BlockKey] = set()

    @rule(number=st.integers(0, 9), group=st.integers(0, 1))
    def put(self, number, group):
        self.tier.put(key(number, group), [content(key(number, group))])
        self.tier.flush()

    @rule(number=st.integers(0, 9), group=st.integers(0, 1))
    def get(self, number, group):
        data = read(self.tier, key(number, group))
        assert data is None or data == content(key(number, group))

    @rule(number=st.integers(0, 9), after=st.integers(0, 900))
    def crash_while_writing(self, number, after):
        self.disk.torn_after = after
        self.tier.put(key(number), [content(key(number))])
        self.restart()

    @rule()
    def restart(self):
        self.tier.close()
        self.disk.torn_after = None
        self.tier = open_tier(self.disk)
        self.heard = {BlockKey(stored.group, h) for stored in self.tier.snapshot() for h in stored.hashes}

    @rule(at=st.integers(0, 4000), group=st.integers(0, 1))
    def rot(self, at, group):
        for name, file in self.disk.files.items():
            if f"-{group}.kv" in name and file:
                file[at % len(file)] ^= 0x40

    @rule(kind=st.sampled_from(["read", "write", ""]))
    def fail(self, kind):
        self.disk.failing = {kind}

    @invariant()
    def bounded(self):
        report = self.tier.report()
        assert report.queued_bytes == 0
        assert all(len(self.tier.hashes(group)) <= slots for group, slots in enumerate(SLOTS))

    @invariant()
    def told(self):
        for event in self.tier.take_events():
            assert event.medium is Medium.SSD
            keys = {BlockKey(event.group, h) for h in event.hashes}
            self.heard = self.heard | keys if isinstance(event, BlocksStored) else self.heard - keys
        assert self.heard == {BlockKey(group, h) for group in (0, 1) for h in self.tier.hashes(group)}

    def teardown(self):
        """No slot was lost, none belongs to two blocks: as many new blocks as there are slots can be read."""
        self.disk.failing, self.disk.torn_after = set(), None
        for group, slots in enumerate(SLOTS):
            blocks = [key(number, group) for number in range(100, 100 + slots)]
            for block in blocks:
                assert self.tier.put(block, [content(block)])
                self.tier.flush()
            assert [read(self.tier, block) for block in blocks] == [content(block) for block in blocks]
        self.tier.close()


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)

WRITER = """
import sys
from pathlib import Path
from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.files import FileDisk
from tests.hybrid_cache.tiers.test_disk import CAPACITY, LAYOUT, content, key, open_tier
tier = open_tier(FileDisk(Path(sys.argv[1])))
number = int(sys.argv[2])
while True:
    tier.put(key(number % 40, number % 2), [content(key(number % 40, number % 2))])
    if number == int(sys.argv[2]):
        tier.flush()
    print("written", flush=True)
    number += 1
"""


def test_killed_at_random_points(tmp_path):
    rng = np.random.default_rng(0)
    for round_ in range(4):
        served = 0
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(round_ * 7)], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            for _ in range(int(rng.integers(0, 100))):
                process.stdout.readline()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        with open_tier(FileDisk(tmp_path)) as tier:
            for k in [key(n, group) for n in range(40) for group in (0, 1)]:
                data = read(tier, k)
                assert data is None or data == content(k)
                served += data is not None
        # At most one slot was being written: what had been flushed before is there, however slow the machine.
        assert served > 0
