"""A body comes whole however it is cut, up to its bound; past it nothing more is read."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.control.bounded import BodyTooLong, read_bounded


async def coming(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@given(st.lists(st.binary(max_size=20)))
def test_a_body_of_just_the_bound_comes_whole(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    assert asyncio.run(read_bounded(coming(chunks), len(whole))) == whole


def test_nothing_is_read_past_the_bound() -> None:
    left = iter([b"12", b"34", b"56", b"78"])
    with pytest.raises(BodyTooLong, match="more than 3 bytes"):
        asyncio.run(read_bounded(coming(left), 3))
    assert list(left) == [b"56", b"78"]
