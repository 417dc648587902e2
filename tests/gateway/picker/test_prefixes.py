"""What went to a server is remembered up to a bound, the beginning of a prompt longest."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.picker.prefixes import SentPrefixes


def test_the_longest_beginning_counts() -> None:
    sent = SentPrefixes()
    sent.sent([1, 2, 3])
    assert [sent.length(blocks) for blocks in ([1, 2, 3, 4], [1, 2, 9], [9], [])] == [3, 2, 0, 0]


def test_the_end_of_the_oldest_prompt_is_forgotten_first() -> None:
    sent = SentPrefixes(max_blocks=4)
    sent.sent([1, 2, 3])
    sent.sent([1, 2, 4, 5])
    assert (sent.length([1, 2, 3]), sent.length([1, 2, 4, 5]), len(sent)) == (2, 4, 4)


def test_a_prompt_that_is_longer_than_all_room_leaves_its_beginning() -> None:
    sent = SentPrefixes(max_blocks=2)
    sent.sent([1, 2, 3])
    assert sent.length([1, 2, 3]) == 2


paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=20)


@given(prompts=paths, room=st.integers(1, 12))
def test_no_block_stays_without_those_before_it(prompts: list[list[int]], room: int) -> None:
    """The names of a prompt's blocks are those of the ways there, as chained hashes are."""
    sent, ways = SentPrefixes(room), [[hash(tuple(each[: n + 1])) for n in range(len(each))] for each in prompts]
    for way in ways:
        sent.sent(way)
        assert len(sent) <= room
        for other in ways:
            held = [sent.length([name]) == 1 for name in other]
            assert sent.length(other) == sum(held)
            assert held == sorted(held, reverse=True)
