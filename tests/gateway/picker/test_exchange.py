"""A request as a proxy tells it: what is answered to each message, in each mode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ExchangeError
from gateway.picker.exchange import (
    PART_BYTES,
    STEPS,
    BodyMode,
    BodyPart,
    ChoiceWanted,
    Direction,
    EndpointChoice,
    Exchange,
    ExchangeState,
    GiveBack,
    PassHead,
    PassPart,
    PassTrailers,
    ProxyAnswer,
    Refusal,
    RequestHead,
    ResponseHead,
    Trailers,
)

REQUEST, RESPONSE = Direction.REQUEST, Direction.RESPONSE
CHOICE = EndpointChoice(("10.0.0.1:8000",))
FULL = RequestHead(headers={}, request_mode=BodyMode.FULL_DUPLEX, response_mode=BodyMode.FULL_DUPLEX)
KEPT = RequestHead(headers={}, request_mode=BodyMode.BUFFERED)
SHED = Refusal(status=429, text="full")


def exchange(max_body_bytes: int = 1 << 20) -> Exchange:
    return Exchange(max_body_bytes)


def test_a_body_that_passes_through_is_given_back_after_the_choice() -> None:
    stream = exchange()
    assert stream.on(FULL) == ()
    assert stream.on(BodyPart(REQUEST, b"ab", False)) == ()
    assert stream.on(BodyPart(REQUEST, b"c", True)) == (ChoiceWanted(head=FULL, body=b"abc"),)
    assert stream.chosen(CHOICE) == [PassHead(REQUEST, CHOICE), GiveBack(REQUEST, b"abc", True)]
    assert stream.held_bytes == 0


def test_a_body_that_the_proxy_keeps_carries_the_choice() -> None:
    stream = exchange()
    assert stream.on(KEPT) == (PassHead(REQUEST),)
    assert stream.on(BodyPart(REQUEST, b"abc", True)) == (ChoiceWanted(head=KEPT, body=b"abc"),)
    assert stream.chosen(CHOICE) == [PassPart(REQUEST, CHOICE)]


def test_of_a_body_that_is_kept_in_part_nothing_is_read() -> None:
    stream, head = exchange(), RequestHead(headers={}, request_mode=BodyMode.BUFFERED_PARTIAL)
    stream.on(head)
    assert stream.on(BodyPart(REQUEST, b"{", False)) == (ChoiceWanted(head=head, body=None),)


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_without_a_body_the_headers_decide(mode: BodyMode) -> None:
    stream, head = exchange(), RequestHead(headers={}, request_mode=mode)
    assert stream.on(head) == (ChoiceWanted(head=head, body=None),)
    assert stream.chosen(CHOICE) == [PassHead(REQUEST, CHOICE)]
    assert stream.on(BodyPart(REQUEST, b"abc", False)) == (PassPart(REQUEST),)


def test_trailers_end_a_body() -> None:
    stream = exchange()
    stream.on(FULL)
    stream.on(BodyPart(REQUEST, b"abc", False))
    assert stream.on(Trailers(REQUEST)) == (ChoiceWanted(head=FULL, body=b"abc"),)
    assert stream.chosen(CHOICE) == [PassHead(REQUEST, CHOICE), GiveBack(REQUEST, b"abc", False), PassTrailers(REQUEST)]


def test_a_refusal_is_the_last_answer() -> None:
    stream = exchange()
    stream.on(RequestHead(headers={}, has_ended=True))
    assert stream.chosen(SHED) == (SHED,)
    assert stream.is_over
    with pytest.raises(ExchangeError, match="ResponseHead while over"):
        stream.on(ResponseHead())


def test_a_body_that_is_too_long_is_refused() -> None:
    stream = exchange(max_body_bytes=3)
    stream.on(FULL)
    (answer,) = stream.on(BodyPart(REQUEST, b"abcd", False))
    assert isinstance(answer, Refusal)
    assert (answer.status, stream.held_bytes) == (413, 0)


def test_a_proxy_that_gives_up_on_a_client_is_answered() -> None:
    stream = exchange()
    stream.on(FULL)
    stream.on(BodyPart(REQUEST, b"{", False))
    assert stream.on(ResponseHead()) == (PassHead(RESPONSE),)
    assert stream.on(BodyPart(RESPONSE, b"timeout", True)) == (GiveBack(RESPONSE, b"timeout", True),)


def test_a_choice_that_no_message_asked_for_is_an_error() -> None:
    with pytest.raises(ExchangeError, match="a choice while awaiting"):
        exchange().chosen(CHOICE)


@pytest.mark.parametrize("state", ExchangeState)
def test_nothing_comes_while_a_choice_is_made_or_after_a_refusal(state: ExchangeState) -> None:
    silent = {ExchangeState.CHOOSING, ExchangeState.OVER}
    assert any(row[0] is state for row in STEPS) == (state not in silent)


def given_back(answers: list[ProxyAnswer], direction: Direction) -> tuple[bytes, list[bool]]:
    parts = [each for each in answers if isinstance(each, GiveBack) and each.direction is direction]
    assert all(len(each.data) <= PART_BYTES for each in parts)
    return b"".join(each.data for each in parts), [each.has_ended for each in parts]


lengths = st.lists(
    st.one_of(st.integers(0, 9), st.integers(PART_BYTES - 1, 2 * PART_BYTES + 1)), min_size=1, max_size=5
)


@given(sent=lengths, answered=lengths, has_trailers=st.booleans())
def test_in_full_duplex_no_byte_is_lost_and_the_end_is_told_once(
    sent: list[int], answered: list[int], has_trailers: bool
) -> None:
    stream, answers = exchange(1 << 30), list[ProxyAnswer]()

    def say(*parts: BodyPart | Trailers | ResponseHead | RequestHead) -> None:
        for part in parts:
            for answer in stream.on(part):
                answers.extend(stream.chosen(CHOICE) if isinstance(answer, ChoiceWanted) else [answer])

    say(FULL)
    for direction, sizes in ((REQUEST, sent), (RESPONSE, answered)):
        if direction is RESPONSE:
            say(ResponseHead())
        bodies = [bytes([index % 251]) * size for index, size in enumerate(sizes)]
        last = len(bodies) - 1
        say(*(BodyPart(direction, data, index == last and not has_trailers) for index, data in enumerate(bodies)))
        if has_trailers:
            say(Trailers(direction))
        data, ends = given_back(answers, direction)
        assert data == b"".join(bodies)
        assert sum(ends) == (not has_trailers)
        assert not any(ends[:-1])
