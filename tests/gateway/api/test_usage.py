"""The one number that is rewritten, and everything around it that is not."""

import asyncio
import json

import pytest

from gateway.api.usage import UsagePatch, recompute_reason, with_cached_tokens

CHUNK = b'data: {"choices": [{"text": "say \\"prompt_tokens\\": 1"}],  "usage": null}\n\n'
USAGE = (
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":1,"a":2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def through(data: bytes, size: int, cached: int | None = 7) -> bytes:
    pieces = [data[start : start + size] for start in range(0, len(data), size)]

    async def number() -> int | None:
        return cached

    async def read() -> bytes:
        return pieces.pop(0) if pieces else b""

    async def main() -> bytes:
        patch, parts = UsagePatch(read, number), []
        while part := await patch.read():
            parts.append(part)
        return b"".join(parts)

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_only_the_usage_event_changes_however_the_stream_is_cut(size: int) -> None:
    expected = USAGE.replace(b'"cached_tokens":1', b'"cached_tokens":7')
    assert through(CHUNK * 3 + USAGE + DONE, size) == CHUNK * 3 + expected + DONE


def test_an_unfinished_event_is_passed_on() -> None:
    assert through(CHUNK + b"data: {", 5) == CHUNK + b"data: {"


def test_nothing_changes_when_the_decode_node_knows_better() -> None:
    assert through(USAGE + DONE, 1000, None) == USAGE + DONE
    recomputed = USAGE.replace(b'"id":"x"', b'"kv_transfer_params":{"recomputed":true,"reason":"timeout"}')
    assert b'"cached_tokens":1' in through(recomputed, 1000)


def test_an_answer_in_one_piece_loses_what_is_not_the_clients() -> None:
    body = b'{"a": 1.50, "usage": {"prompt_tokens": 3}, "kv_transfer_params": {"x": 1}}'
    assert json.loads(with_cached_tokens(body, 2)) == {
        "a": 1.5,
        "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    }
    assert with_cached_tokens(b'{"a": 1.50}', 2) == b'{"a":1.50}'


def test_a_recompute_is_found_with_its_reason() -> None:
    assert recompute_reason(b'{"kv_transfer_params": {"recomputed": true, "reason": "timeout"}}') == "timeout"
    assert recompute_reason(b'{"recomputed":true,"reason":"digest_mismatch"}') == "digest_mismatch"
    assert recompute_reason(b'{"recomputed":true}') == "unknown"
    assert recompute_reason(b'{"text": "\\"recomputed\\": true"}') is None
