"""Frames of a kept connection, after a greeting."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.control.calls import AGENT, CALLER, CallBuffer, CallOutbox
from transport.control.messages import MessageError, frame


@given(bodies=st.lists(st.binary(max_size=20), max_size=5), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_what_arrives_in_any_pieces_is_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    said = CALLER + b"".join(map(frame, bodies))
    ends = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    buffer = CallBuffer(CALLER)
    heard = [body for start, end in itertools.pairwise(ends) for body in buffer.feed(said[start:end])]
    assert heard == bodies
    assert buffer.greeted


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"prfaas caller 2\n", AGENT])
def test_who_greets_otherwise_is_no_peer(said: bytes) -> None:
    with pytest.raises(MessageError, match="not the greeting"):
        CallBuffer(CALLER).feed(said)


def test_a_frame_beyond_every_bound_is_refused_before_it_is_there() -> None:
    with pytest.raises(MessageError, match="frame of"):
        CallBuffer(CALLER).feed(CALLER + b"\xff" * 4)


class Paper(asyncio.Transport):
    """Takes down what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False


def test_what_is_said_in_one_turn_of_the_loop_leaves_in_one_write() -> None:
    async def scenario() -> None:
        outbox = CallOutbox(paper := Paper())
        outbox.say(b"a")
        outbox.say(b"b")
        assert paper.writes == []
        await asyncio.sleep(0)
        outbox.say(b"c")
        outbox.flush()
        await asyncio.sleep(0)
        assert paper.writes == [frame(b"a") + frame(b"b"), frame(b"c")]

    asyncio.run(scenario())
