"""What a seam knows of a stream, however its bytes come: vLLM's events here, which name tokens one by one and in groups."""

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.sse import DONE
from gateway.errors import LegFailed
from gateway.pipeline.stream_resume import StreamResume

HEAD = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "tiny"}
ERROR = b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}\n\n'


def sse(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def event(text: str, tokens: list[int] | None, finish: str | None = None) -> bytes:
    names = {} if tokens is None else {"token_ids": tokens}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish, **names}
    return sse({**HEAD, "choices": [choice], "prompt_token_ids": None})


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[bytes, bytes, list[int]]]:
    """Events as the engine and as the client has them, and the tokens of each; texts may look like what is taken out."""
    tokens = st.lists(st.integers(0, 200_000), max_size=4)
    texts = st.one_of(
        st.text(max_size=6), st.sampled_from([',"token_ids":[1]', '"created":5', "\n\n", 'data: {"error"'])
    )
    said = draw(st.lists(st.tuples(texts, tokens), min_size=1, max_size=8))
    events = [(event("", None), event("", None), list[int]())]  # the role
    events += [(event(text, each), event(text, None), each) for text, each in said]
    return [*events, (DONE, DONE, [])]


def cut(whole: bytes, at: list[float]) -> list[bytes]:
    edges = sorted({0, len(whole), *(int(share * len(whole)) for share in at)})
    return [whole[start:end] for start, end in pairwise(edges)]


SPLITS = st.lists(st.floats(0, 1), max_size=10)


@given(events=streams(), at=SPLITS)
def test_clients_get_whole_events_without_names_however_the_bytes_come(
    events: list[tuple[bytes, bytes, list[int]]], at: list[float]
) -> None:
    seam = StreamResume(1 << 20)
    told = b"".join(seam.take(chunk) for chunk in cut(b"".join(each[0] for each in events), at))
    assert told == b"".join(each[1] for each in events)
    assert seam.tokens == [token for each in events for token in each[2]]
    assert seam.is_whole


@given(events=streams(), at=SPLITS, end=st.floats(0, 1))
def test_what_is_known_at_a_break_is_what_the_client_has_had(
    events: list[tuple[bytes, bytes, list[int]]], at: list[float], end: float
) -> None:
    """Events that follow are asked for after those tokens: none is missing, none comes twice."""
    whole = b"".join(each[0] for each in events)
    seam, relayed = StreamResume(1 << 20), 0
    told = b"".join(seam.take(chunk) for chunk in cut(whole[: int(end * len(whole))], at))
    while (
        relayed < len(events) and b"".join(each[1] for each in events[: relayed + 1]) == told[: _size(events, relayed)]
    ):
        relayed += 1
    assert told == b"".join(each[1] for each in events[:relayed])
    assert seam.tokens == [token for each in events[:relayed] for token in each[2]]
    seam.reopen()
    rest = b"".join(seam.take(each[0]) for each in events[relayed:])
    assert told + rest == b"".join(each[1] for each in events)


def _size(events: list[tuple[bytes, bytes, list[int]]], relayed: int) -> int:
    return sum(len(each[1]) for each in events[: relayed + 1])


@given(events=streams(), at=SPLITS)
def test_an_error_is_never_the_clients_to_see_while_tokens_are_known(
    events: list[tuple[bytes, bytes, list[int]]], at: list[float]
) -> None:
    named = [each for each in events[:-1] if each[2]]
    if not named:
        return
    told: list[bytes] = []
    with pytest.raises(LegFailed, match="EngineCore") as failure:
        relay(cut(b"".join(each[0] for each in events[:-1]) + ERROR + DONE, at), told)
    assert failure.value.reason == "stream_error"
    assert b"".join(told) == b"".join(each[1] for each in events[:-1])


def relay(chunks: Iterable[bytes], told: list[bytes]) -> None:
    seam = StreamResume(1 << 20)
    for chunk in chunks:
        told.append(seam.take(chunk))
        seam.check()
