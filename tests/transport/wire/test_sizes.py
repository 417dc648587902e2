"""Runs of equal sizes against the sizes one by one."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.helpers import Memory
from transport.path.shm import ArenaSource
from transport.wire.frames import MAX_RANGES, MAX_TRANSFER_BYTES
from transport.wire.manifest import Manifest, Outbox
from transport.wire.sizes import MAX_KEPT_RUNS, RangeSizes, SizesOutline, consecutive

runs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=8)


def listed(told: Sequence[tuple[int, int]]) -> list[int]:
    return [size for size, count in told for _ in range(count)]


@given(runs)
def test_runs_are_the_sizes_one_by_one(told: list[tuple[int, int]]) -> None:
    sizes, one_by_one = RangeSizes(told), listed(told)
    ends = [0, *accumulate(one_by_one)]
    assert (sizes.num_ranges, sizes.total_bytes) == (len(one_by_one), sum(one_by_one))
    assert [sizes.offset(index) for index in range(len(one_by_one) + 1)] == ends
    at = [index for index, size in enumerate(one_by_one) for _ in range(size)]
    assert [sizes.at(offset) for offset in range(sizes.total_bytes)] == at
    assert list(sizes.between(0, sizes.num_ranges)) == one_by_one
    assert list(sizes.between(2, 7)) == one_by_one[2:7]


class Unlisted(tuple[tuple[int, int], ...]):
    """Runs that a search must not pass over one by one."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        raise AssertionError("a chunk is looked up in all runs of its transfer")


def test_the_sizes_of_few_ranges_are_found_without_a_look_at_all_runs() -> None:
    sizes = RangeSizes([(1, 1), (2, 1)] * 10)
    sizes.runs = Unlisted(sizes.runs)
    assert list(sizes.between(12, 15)) == [1, 2, 1]


@given(runs)
def test_the_digest_is_that_of_the_sizes_one_by_one(told: list[tuple[int, int]]) -> None:
    """As senders and receivers of every version compute it."""
    digest = hashlib.blake2b(digest_size=16)
    for size in listed(told):
        digest.update(size.to_bytes(8, "little"))
    assert RangeSizes(told).digest == RangeSizes.of(listed(told)).digest == digest.digest()


def test_a_million_sizes_have_the_digest_of_their_bytes() -> None:
    digest = hashlib.blake2b((65_536).to_bytes(8, "little") * 1_000_003 + bytes(8), digest_size=16).digest()
    assert RangeSizes([(65_536, 1_000_003), (0, 1)]).digest == digest


@pytest.mark.parametrize("index", [-1, 4])
def test_a_range_that_is_none_has_no_place(index: int) -> None:
    with pytest.raises(IndexError):
        Manifest([1, 2, 3]).bounds(index)
    with pytest.raises(IndexError):
        RangeSizes([(1, 2)]).at(index)


@pytest.mark.parametrize("told", [[(-1, 1)], [(1, -1)], [(1, MAX_RANGES + 1)], [(MAX_TRANSFER_BYTES, 2)]])
def test_sizes_that_no_transfer_has_are_refused(told: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"negative|too large"):
        Manifest(RangeSizes(told))


def test_of_many_different_sizes_only_an_outline_is_kept() -> None:
    few = RangeSizes([(7, 1_000_000)])
    assert few.kept() is few
    many = RangeSizes.of(range(MAX_KEPT_RUNS + 1))
    assert many.kept() == SizesOutline(many.digest, many.num_ranges, many.total_bytes)


@given(runs, st.data())
def test_views_of_many_ranges_are_those_of_each(told: list[tuple[int, int]], data: st.DataObject) -> None:
    manifest, memory = Manifest(RangeSizes(told)), Memory(listed(told), page=4, fill=True)

    def between(first: int, stop: int) -> list[tuple[int, int]]:
        return list(chain.from_iterable(memory.segments(index) for index in range(first, stop)))

    start, stop = sorted(data.draw(st.integers(0, manifest.total_bytes)) for _ in range(2))
    line = b"".join(memory.content())
    one_by_one = manifest.views(memory, start, stop)
    for source in (
        ArenaSource("", memoryview(memory.buffer), memory.segments, between),
        ArenaSource("", memoryview(memory.buffer), memory.segments),
    ):
        views = manifest.views(source, start, stop)
        assert b"".join(views) == b"".join(one_by_one) == line[start:stop]
        extents = source.extents(*manifest.covering(start, stop), stop - start)
        assert b"".join(memory.buffer[at : at + size] for at, size in extents) == line[start:stop]


@pytest.mark.parametrize("segments", [[(0, 9)], [(0, 11)], [], [(0, 4), (1000, 6)]])
def test_memory_that_is_not_as_long_as_its_ranges_is_refused(segments: list[tuple[int, int]]) -> None:
    source = ArenaSource("", memoryview(bytes(100)), lambda index: segments, lambda first, stop: segments)
    with pytest.raises(ValueError, match="10 bytes"):
        Manifest([5, 5]).views(source, 1, 9)


@given(st.lists(st.one_of(st.integers(0, 9), st.tuples(st.integers(0, 9), st.integers(0, 4)))))
def test_indexes_keep_their_order_as_ranges(told: list[int | tuple[int, int]]) -> None:
    indexes = [each if isinstance(each, int) else range(each[0], sum(each)) for each in told]
    expanded = [index for each in indexes for index in ([each] if isinstance(each, int) else each)]
    found = consecutive(indexes)
    assert [index for run in found for index in run] == expanded
    assert all(found)


def test_a_range_with_steps_is_its_indexes() -> None:
    assert consecutive(range(0, 6, 2)) == [range(1), range(2, 3), range(4, 5)]
    assert consecutive(range(5, 5)) == []


@given(runs, st.lists(st.lists(st.integers(0, 40))))
def test_bytes_leave_in_the_order_in_which_ranges_became_ready(
    told: list[tuple[int, int]], calls: list[list[int]]
) -> None:
    manifest = Manifest(RangeSizes(told))
    wanted, seen = [], set[int]()
    outbox = Outbox(manifest)
    for call in calls:
        indexes = [index for index in call if index < manifest.num_ranges]
        outbox.ready(indexes)
        for index in indexes:
            wanted += [byte for byte in range(*manifest.bounds(index)) if index not in seen]
            seen.add(index)
    taken: list[int] = []
    while chunk := outbox.take(3, lane=0):
        taken += range(*chunk)
    assert taken == wanted
