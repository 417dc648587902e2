import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.control.messages import (
    MAX_MESSAGE_BYTES,
    ClaimLanding,
    JobPages,
    MessageBuffer,
    MessageError,
    decode_from_agent,
    decode_from_engine,
    encode,
)

CLAIM = ClaimLanding(job="j", transfer_id="t", tokens_digest=b"d", timeout_s=1.0)
PAGES = JobPages(job="j", num_tokens=70, cached_tokens=64, blocks=(((1, 2), ()),), states=({64: (3,), 70: (4, 5)},))


@given(st.lists(st.integers(1, 40), max_size=20))
def test_frames_survive_any_cut(sizes: list[int]) -> None:
    stream = encode(CLAIM) + encode(PAGES)
    buffer, bodies = MessageBuffer(), []
    for size in [*sizes, len(stream)]:
        bodies += buffer.feed(stream[:size])
        stream = stream[size:]
    assert decode_from_engine(bodies[0]) == CLAIM
    assert decode_from_agent(bodies[1]) == PAGES


def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(MessageError, match="the limit is"):
        MessageBuffer().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


@given(st.binary(max_size=64))
def test_garbage_is_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode_from_agent(body)


def test_messages_have_a_direction() -> None:
    body = encode(PAGES)[4:]
    with pytest.raises(MessageError, match="not a message of an engine"):
        decode_from_engine(body)
