"""What the disk tier takes, of the disk and of other threads, and how long it waits."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.spec import LinearState
from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.files import Buffer, FileDisk
from tests.hybrid_cache.builders import make_layout
from tests.hybrid_cache.tiers.test_disk import CAPACITY, LAYOUT, FaultyDisk, content, key, open_tier, read


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_a_directory_never_exceeds_its_bytes_whatever_layouts_and_sizes_come(tmp_path):
    (tmp_path / "a-note").write_text("not a tier's")
    for number in range(3):
        layout = ModelLayout(f"model-{number}", LAYOUT.dtype, LAYOUT.block_size, LAYOUT.groups)
        with DiskTier(layout, FileDisk(tmp_path), capacity_bytes=CAPACITY) as tier:
            for k in [key(n, group) for n in range(20) for group in (0, 1)]:
                tier.put(k, [content(k)])
            tier.flush()
        assert bytes_in(tmp_path) <= CAPACITY
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) > CAPACITY // 2
    with DiskTier(layout, FileDisk(tmp_path), capacity_bytes=CAPACITY // 4) as tier:
        assert bytes_in(tmp_path) <= CAPACITY // 4
        assert tier.report().recovered > 0
        assert all(read(tier, key(n)) in (None, content(key(n))) for n in range(20))
    assert bytes_in(tmp_path) <= CAPACITY // 4
    assert (tmp_path / "a-note").exists()


def test_a_group_without_room_is_named(caplog):
    big = LAYOUT.block_bytes(1)
    with DiskTier(LAYOUT, FaultyDisk(), capacity_bytes=2 * big) as tier:
        assert f"no block of group 1 is kept on disk: one has {big} bytes, and its share is {big}" in caplog.text
        assert not tier.put(key(1, group=1), [content(key(1, group=1))])
        assert tier.report().refused_writes == 1
    caplog.clear()
    with open_tier(FaultyDisk(), queue_bytes=big - 1):
        assert f"no block of group 1 is kept on disk: one has {big} bytes, the queue {big - 1}" in caplog.text


def test_close_does_not_wait_for_a_disk_that_hangs():
    class Hanging(FaultyDisk):
        def __init__(self) -> None:
            super().__init__()
            self.reached, self.answers, self.closed = threading.Event(), threading.Event(), threading.Event()

        def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
            self.reached.set()
            assert self.answers.wait(60.0)
            super().write(name, offset, parts)

        def close(self) -> None:
            self.closed.set()

    tier = open_tier(disk := Hanging())
    for number in range(3):
        assert tier.put(key(number), [content(key(number))])
    assert disk.reached.wait(60.0)
    assert not tier.close(timeout_s=0.01)
    assert not disk.closed.is_set(), "a thread is still in it"
    disk.answers.set()
    assert disk.closed.wait(60.0), "it is let go of as soon as it answers"
    assert tier.report().blocks == 1, "what was queued is lost"


def test_other_threads_run_while_a_large_block_is_copied():
    """Only while it is given up explicitly: the interpreter itself would switch after minutes."""
    layout = make_layout(LinearState(bytes_per_snapshot=32 << 20))
    parts, into = [bytes(32 << 20)], [memoryview(bytearray(32 << 20))]
    beats, stop, interval = 0, False, sys.getswitchinterval()

    def beat() -> None:
        nonlocal beats
        while not stop:
            beats += 1
            time.sleep(0)

    class Deaf(FaultyDisk):
        def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
            assert held.wait(60.0)

    held, heart = threading.Event(), threading.Thread(target=beat)
    with DiskTier(layout, Deaf(), capacity_bytes=1 << 30, queue_bytes=1 << 30) as tier:
        heart.start()
        try:
            sys.setswitchinterval(600.0)
            for number, copy in enumerate([lambda k: tier.put(k, parts), lambda k: tier.get(key(0), into)] * 2):
                before = beats
                for attempt in range(10):
                    copy(key(0 if number == 0 else 10 * number + attempt))
                    if beats > before:
                        break
                assert beats > before, ("put", "get")[number % 2]
        finally:
            stop = True
            sys.setswitchinterval(interval)
            held.set()
            heart.join(60.0)
