import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.staged.permits import Permits

HOLDER = """
import sys
from engine.staged.permits import Permits
permits = Permits(int(sys.argv[1]), 2)
with permits.writing(1):
    print("holds", flush=True)
    sys.stdin.read()
print(permits.has_pages(3, 7), flush=True)
sys.stdin.close()
"""


@pytest.fixture
def permits():
    made = Permits.create(2)
    yield made
    made.close()


@pytest.fixture
def holder(permits):
    """A process that is stage 1, in the middle of writing until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(permits.fd)], pass_fds=[permits.fd], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def ending(holder):
    """Has it end its write in a moment; set when it is told to."""
    told = threading.Event()

    def tell():
        told.set()
        holder.stdin.close()

    threading.Timer(0.2, tell).start()
    return told


def test_an_old_number_has_nothing_in_a_slot(permits):
    permits.give(3, 7)
    permits.give_pages(3, 7)
    assert permits.wants(3, 7)
    assert permits.has_pages(3, 7)
    permits.give(3, 8)
    assert (permits.wants(3, 7), permits.has_pages(3, 7), permits.has_pages(3, 8)) == (False, False, False)
    permits.give_pages(3, 8)
    permits.cancel(3, 7)
    assert permits.withdraw_pages(3, 7) == []
    assert permits.wants(3, 8)
    assert permits.has_pages(3, 8)


def test_pages_are_taken_back_when_a_write_under_way_has_ended(permits, holder):
    permits.give_pages(3, 7)
    ends = ending(holder)
    assert permits.withdraw_pages(3, 7, stuck_s=60.0) == []
    assert ends.is_set()
    assert holder.stdout.readline() == "False\n"


def test_who_takes_pages_back_while_somebody_does_waits_as_well(permits, holder):
    permits.give_pages(3, 7)
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(permits.withdraw_pages, 3, 7, stuck_s=60.0)
        while permits.has_pages(3, 7):
            time.sleep(0.001)
        ends = ending(holder)
        assert permits.withdraw_pages(3, 7, stuck_s=60.0) == []
        assert ends.is_set()
        assert first.result() == []


def test_who_does_not_let_go_is_named_and_dead_ones_have_let_go(permits, holder):
    permits.give_pages(3, 7)
    assert permits.withdraw_pages(3, 7, stuck_s=0.05) == [1]
    holder.kill()
    holder.wait()
    permits.give_pages(3, 8)
    assert permits.withdraw_pages(3, 8, stuck_s=0.05) == []


def test_beats_are_counted_by_stage(permits):
    permits.beat(1)
    permits.beat(1)
    assert (permits.beats(0), permits.beats(1)) == (0, 2)
