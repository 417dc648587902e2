"""What the storm says of memory: a process beside itself when it was quiet, a new one beside its peers."""

from tests.storm.__main__ import Sizes
from tests.storm.system import Running

MIB = 1 << 20


def running(pid: int, kind: str, own_mib: int) -> Running:
    return Running(pid, kind, "n", rss_bytes=1000 * MIB, own_bytes=own_mib * MIB)


QUIET = [running(1, "agent", 100), running(2, "agent", 150), running(3, "gateway", 80)]


def test_what_grows_by_a_fifth_is_fine_and_more_is_not() -> None:
    assert Sizes(QUIET).grown([running(1, "agent", 120), running(3, "gateway", 96)]) == []
    assert Sizes(QUIET).grown([running(1, "agent", 121), running(2, "agent", 150)]) == [
        "agent n (pid 1) has 121 MiB, when it was quiet 100 MiB"
    ]


def test_one_that_was_started_again_is_compared_with_the_largest_of_its_kind() -> None:
    assert Sizes(QUIET).grown([running(9, "agent", 180)]) == []
    assert len(Sizes(QUIET).grown([running(9, "agent", 181)])) == 1
