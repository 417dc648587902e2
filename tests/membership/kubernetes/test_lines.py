"""A watch comes in parts of any length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.errors import KubernetesFailed
from membership.kubernetes.lines import WatchLines

LINES = st.lists(st.binary(min_size=1, max_size=20).filter(lambda line: b"\n" not in line and bool(line.strip())))


@given(LINES, st.lists(st.integers(1, 7)))
def test_lines_are_the_same_however_they_come(lines: list[bytes], sizes: list[int]) -> None:
    rest, found, cut = b"".join(line + b"\n" for line in lines) + b"half", list[bytes](), WatchLines(20, "pods")
    for size in (*sizes, len(rest)):
        found += cut.feed(rest[:size])
        rest = rest[size:]
    assert found == lines


def test_a_line_has_a_bound() -> None:
    cut = WatchLines(4, "pods")
    assert list(cut.feed(b"1234\n1234")) == [b"1234"]
    with pytest.raises(KubernetesFailed, match="pods: an object has more than 4 bytes"):
        list(cut.feed(b"5"))
