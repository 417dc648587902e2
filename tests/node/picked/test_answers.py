"""What clients read of an engine's answer."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.picked.answers import MAX_HELD_BYTES, as_clients_read, no_prefill, patched

USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": 0}}
CHUNK = b'data: {"choices": [{"text": "a \\"prompt_tokens\\" b"}], "at": 1.50}\n\n'
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
END = b"data: [DONE]\n\n"


def read(chunks: Sequence[bytes], cached_tokens: int | None = 3, *, is_stream: bool = True) -> bytes:
    async def said() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def cached() -> int | None:
        return cached_tokens

    async def whole() -> bytes:
        return b"".join([part async for part in as_clients_read(said(), cached, is_stream=is_stream)])

    return asyncio.run(whole())


@given(st.lists(st.integers(0, len(CHUNK + CHUNK + LAST + END)), max_size=8))
def test_the_usage_of_a_stream_is_the_prefills_however_it_comes_in_parts(cuts: list[int]) -> None:
    text = CHUNK + CHUNK + LAST + END
    ends = [0, *sorted(cuts), len(text)]
    told = read([text[one:other] for one, other in pairwise(ends)])
    assert told.startswith(CHUNK + CHUNK)
    assert told.endswith(END)
    event = told.removeprefix(CHUNK + CHUNK).removesuffix(END)
    usage = json.loads(event.removeprefix(b"data: "))["usage"]
    assert usage == USAGE | {"prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 0}}


def test_a_whole_answer_is_the_same() -> None:
    text = json.dumps({"id": "a", "usage": USAGE}).encode()
    told = json.loads(read([text[:9], text[9:]], is_stream=False))
    assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "audio_tokens": 0}


def test_what_was_computed_after_all_keeps_its_number_and_what_is_ours_is_told_to_none() -> None:
    text = json.dumps({"usage": USAGE, "kv_transfer_params": {"recomputed": True, "reason": "x"}}).encode()
    assert json.loads(read([text], is_stream=False)) == {"usage": USAGE}
    assert json.loads(read([text], None, is_stream=False)) == {"usage": USAGE}


@pytest.mark.parametrize("text", [b"", b"x", b'{"usage": 3, "prompt_tokens": 1}', b'["prompt_tokens"]'])
def test_what_is_none_of_ours_passes(text: bytes) -> None:
    assert read([text], is_stream=False) == text
    assert patched(b"\xff", 3) == b"\xff"
    assert asyncio.run(no_prefill()) is None


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_is_too_long_to_hold_passes_as_it_comes(is_stream: bool) -> None:
    parts = [b'{"prompt_tokens": "', b"x" * MAX_HELD_BYTES, b"y" * 10, b'"}\n\n']
    assert read(parts, is_stream=is_stream) == b"".join(parts)
