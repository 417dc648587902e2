"""Bodies in hand."""

import pytest

from node.errors import BadPickedRequest
from node.picked.held_bodies import MAX_BODY_BYTES, HeldBodies, HeldBody


def test_bodies_count_until_they_are_let_go() -> None:
    held = HeldBodies(max_bytes=10)
    one, other = HeldBody(held), HeldBody(held)
    one.add(b"abc")
    one.add(b"de")
    other.add(b"fghij")
    assert (one.whole(), held.num_bytes) == (b"abcde", 10)
    with pytest.raises(BadPickedRequest) as refused:
        other.add(b"k")
    assert refused.value.status == 503
    other.let_go()
    other.let_go()
    assert held.num_bytes == 5
    one.let_go()
    assert held.num_bytes == 0


def test_one_body_has_a_bound() -> None:
    held = HeldBodies()
    body = HeldBody(held)
    with pytest.raises(BadPickedRequest) as refused:
        body.add(bytes(MAX_BODY_BYTES + 1))
    assert refused.value.status == 413
    body.let_go()
    assert held.num_bytes == 0
