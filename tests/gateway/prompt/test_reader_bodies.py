"""Bodies of any size and shape are read while the event loop goes on, wherever that happens."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from gateway.api.openai import Endpoint
from gateway.errors import ApiError, TenantLimited
from gateway.prompt.prompt import Hashing, Prompt, PromptMemory, read_call
from gateway.prompt.reader import PromptReader
from tests.gateway.prompt.test_reader import HASHING, MODEL, long_body, reader
from tests.gateway.worlds import PATIENCE_S, model_of
from tests.prompts.builders import text_tokenizer

pytestmark = pytest.mark.long

BODY_BYTES = 10 * 1024 * 1024
MAX_LAG_S = 0.020
TRIES = 3
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def filled(head: bytes, part: bytes, tail: bytes) -> bytes:
    """The longest body within the limit that repeats `part`."""
    return head + part * ((BODY_BYTES - len(head) - len(tail)) // len(part)) + tail


LONG_BODIES = {
    "text": (Endpoint.COMPLETIONS, filled(b'{"model":"m","prompt":"', b"hello there ", b'"}')),
    "token ids": (Endpoint.COMPLETIONS, filled(b'{"model":"m","prompt":[1', b",7", b"]}")),
    "turns": (
        Endpoint.CHAT,
        filled(
            b'{"model":"m","messages":[{"role":"user","content":"hi"}', b',{"role":"user","content":"hello"}', b"]}"
        ),
    ),
    "tools": (
        Endpoint.CHAT,
        filled(
            b'{"model":"m",' + MESSAGES + b',"tools":[{"type":"function","function":{"name":"f","parameters":{"x":[1',
            b",[]",
            b"]}}}]}",
        ),
    ),
    "template's": (
        Endpoint.CHAT,
        filled(b'{"model":"m",' + MESSAGES + b',"chat_template_kwargs":{"x":[1', b",{}", b"]}}"),
    ),
    "stops": (Endpoint.COMPLETIONS, filled(b'{"model":"m","prompt":"x","stop":["a"', b',"b"', b"]}")),
    "fields": (
        Endpoint.COMPLETIONS,
        b'{"model":"m","prompt":"x"' + b"".join(b',"k%06d":1' % n for n in range(800_000)) + b"}",
    ),
    "no JSON": (Endpoint.COMPLETIONS, b"[" * BODY_BYTES),
}


async def longest_step_s(work: "asyncio.Task[object]") -> float:
    """The most CPU time that this process spent between two turns of its event loop, until `work` was done.

    On a busy machine others take time, but not this process's: what it spends in between, it has withheld from the loop.
    What the tests before this one have left on the heap is not searched for garbage meanwhile.
    """
    gc.collect()
    gc.freeze()
    try:
        longest, last = 0.0, time.process_time()
        while not work.done():
            await asyncio.sleep(0.001)
            now = time.process_time()
            longest, last = max(longest, now - last), now
        return longest
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class KeptReader:
    """A reader whose process is there, on a loop of its own that runs while one of the tests that share it does."""

    runner: asyncio.Runner
    reads: PromptReader

    def run(self, test: Callable[[PromptReader], Awaitable[None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(2 * PATIENCE_S):
                await test(self.reads)

        self.runner.run(bounded())


async def start_threads(reads: PromptReader) -> None:
    """As many as read at once: one of each size, and two of any. A test that needed one more would seem to leave it behind."""
    together = threading.Barrier(4)
    waits = (reads.think(lambda _: together.wait(PATIENCE_S), num_bytes=size) for size in (1, 100_000, 1, 1))
    assert len(set(await asyncio.gather(*waits))) == 4


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptReader]:
    """For tests that leave a reader as it was."""
    with asyncio.Runner() as runner:
        held = AsyncExitStack()
        reads = runner.run(held.enter_async_context(reader()))
        runner.run(reads.warm(PATIENCE_S))
        runner.run(start_threads(reads))
        yield KeptReader(runner, reads)
        runner.run(held.aclose())


@pytest.mark.parametrize("kind", LONG_BODIES)
def test_the_event_loop_goes_on_while_the_longest_bodies_are_read(kept: KeptReader, kind: str) -> None:
    async def scenario(reads: PromptReader) -> None:
        endpoint, body = LONG_BODIES[kind]
        assert BODY_BYTES * 0.9 < len(body) <= BODY_BYTES
        await reads.read(Endpoint.COMPLETIONS, long_body("warm"), MODEL)  # the process has started

        async def read_and_forward() -> object:
            call, _ = await reads.read(endpoint, body, MODEL)
            return call.body({"max_tokens": 1})

        lags_s = []
        for _ in range(TRIES):  # what holds the loop holds it each time; a page fault of a crowded machine does not
            work: asyncio.Task[object] = asyncio.create_task(read_and_forward())
            lags_s.append(await longest_step_s(work))
            error = work.exception()
            assert error is None or (isinstance(error, ApiError) and error.status == 400)
            assert (error is None) == (kind in ("tools", "template's"))
            if lags_s[-1] <= MAX_LAG_S:
                return
        pytest.fail(f"the loop stood still each time: {lags_s}")

    kept.run(scenario)


def test_long_bodies_are_read_as_short_ones_are(kept: KeptReader) -> None:
    async def scenario(reads: PromptReader) -> None:
        body = long_body("hello there")
        hashing = Hashing(block_size=16, salt=b"salt", key=b"key", earlier=HASHING)
        others = (("new", replace(hashing, block_size=32)), ("newer", HASHING))
        rotating = replace(model_of(hashing), revision="old", others=others)
        call, prompt = await reads.read(Endpoint.COMPLETIONS, body, rotating)
        same_call, same_prompt = read_call(Endpoint.COMPLETIONS, body, rotating, PromptMemory(text_tokenizer()))
        assert prompt == same_prompt
        assert prompt.earlier is not None
        assert prompt.within("new").earlier is not None
        assert isinstance(prompt, Prompt)
        assert call.options == same_call.options
        assert call.body({"max_tokens": 1}) == same_call.body({"max_tokens": 1})

    kept.run(scenario)


def test_a_mistake_in_a_long_body_is_told_like_any_other(kept: KeptReader) -> None:
    async def scenario(reads: PromptReader) -> None:
        with pytest.raises(ApiError, match="maximum context length is 100 tokens") as refusal:
            await reads.read(Endpoint.COMPLETIONS, long_body("x"), model_of(HASHING, 100))
        error = refusal.value
        assert (error.status, error.param, error.code) == (400, "prompt", "context_length_exceeded")

    kept.run(scenario)


def test_who_is_refused_when_its_turn_comes_is_not_read(kept: KeptReader) -> None:
    def refuse() -> None:
        raise TenantLimited("tokens are owed", "tokens_per_minute", 1.0, {})

    async def scenario(reads: PromptReader) -> None:
        for body in (long_body("a", 100_000), long_body("b")):
            with pytest.raises(TenantLimited):
                await reads.read(Endpoint.COMPLETIONS, body, MODEL, check=refuse)
            await reads.read(Endpoint.COMPLETIONS, body, MODEL)  # no place was lost
        assert reads.num_idle == 1

    kept.run(scenario)
