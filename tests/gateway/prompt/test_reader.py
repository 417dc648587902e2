"""Bodies of any size and shape are read while the event loop goes on, wherever that happens."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

import gateway.prompt.reader_pool
from gateway.api.openai import Endpoint
from gateway.errors import ApiError, Overloaded, ReaderDied, TenantLimited
from gateway.prompt.prompt import Hashing, Prompt, PromptMemory, read_call
from gateway.prompt.reader import LONG_BODY_BYTES, LONGER_BODY_BYTES, PromptReader
from gateway.tasks import TaskSet
from planner.decisions.admission.waiting import TenantShare
from prompts.tokens.encoder import TextEncoder
from tests.gateway.worlds import PATIENCE_S, model_of, on_loop, until
from tests.prompts.builders import bpe, text_tokenizer

pytestmark = pytest.mark.long

HASHING = Hashing(block_size=16, salt=b"salt")
MODEL = model_of(HASHING)
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


@asynccontextmanager
async def reader(timeout_s: float = 120.0) -> AsyncIterator[PromptReader]:
    tasks = TaskSet(lambda name: pytest.fail(name))
    made = PromptReader(text_tokenizer(), tasks, timeout_s=timeout_s)
    try:
        yield made
    finally:
        await tasks.join(60.0)
        await made.close()


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


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptReader]:
    """For tests that leave a reader as it was."""
    with asyncio.Runner() as runner:
        held = AsyncExitStack()
        reads = runner.run(held.enter_async_context(reader()))
        runner.run(reads.warm(PATIENCE_S))
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


def long_body(word: str, size: int = LONG_BODY_BYTES) -> bytes:
    return json.dumps({"model": "m", "prompt": (f"{word} " * size)[:size], "max_tokens": 1}).encode()


def test_long_bodies_are_read_as_short_ones_are(kept: KeptReader) -> None:
    async def scenario(reads: PromptReader) -> None:
        body = long_body("hello there")
        call, prompt = await reads.read(Endpoint.COMPLETIONS, body, MODEL)
        same_call, same_prompt = read_call(Endpoint.COMPLETIONS, body, MODEL, PromptMemory(text_tokenizer()))
        assert prompt == same_prompt
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


@on_loop
async def test_a_client_that_leaves_does_not_spoil_the_next_answer() -> None:
    async with reader() as reads:
        first = asyncio.create_task(reads.read(Endpoint.COMPLETIONS, long_body("hello"), MODEL))
        await asyncio.sleep(0)
        first.cancel()
        _, prompt = await reads.read(Endpoint.COMPLETIONS, long_body("there"), MODEL)
    assert prompt == read_call(Endpoint.COMPLETIONS, long_body("there"), MODEL, PromptMemory(text_tokenizer()))[1]


def children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@on_loop
async def test_a_process_that_dies_costs_its_request_and_the_next_one_gets_another() -> None:
    before = children()
    async with reader() as reads:
        await reads.read(Endpoint.COMPLETIONS, long_body("a"), MODEL)
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)
        asking = asyncio.create_task(reads.read(Endpoint.COMPLETIONS, long_body("b"), MODEL))
        await until(lambda: reads.num_idle == 0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReaderDied):
            await asking
        assert (await reads.read(Endpoint.COMPLETIONS, long_body("b"), MODEL))[1].num_tokens
        await until(lambda: pid not in children())
    assert children() == before


@on_loop
async def test_a_process_that_is_killed_while_it_waits_costs_no_request() -> None:
    before = children()
    async with reader() as reads:
        await reads.read(Endpoint.COMPLETIONS, long_body("a"), MODEL)
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert (await reads.read(Endpoint.COMPLETIONS, long_body("b"), MODEL))[1].num_tokens


def chat_body(turns: int) -> bytes:
    messages = [{"role": "user", "content": f"turn {turn} " + "over the lazy dog " * 60} for turn in range(turns)]
    return json.dumps({"model": "m", "messages": messages}, separators=(",", ":")).encode()


@on_loop
async def test_a_chat_that_goes_on_by_little_is_read_at_once_and_what_is_new_in_threads() -> None:
    pytest.importorskip("fastokens")
    before, tasks, tokenizer = children(), TaskSet(lambda name: pytest.fail(name)), text_tokenizer()
    tokenizer.encoder.hasten()
    reads, there = PromptReader(tokenizer, tasks), list[bool]()
    try:
        for turns in (40, 41, 42, 43, 44, 45, 45, 70, 1500):
            body = chat_body(turns)
            reading = asyncio.ensure_future(reads.read(Endpoint.CHAT, body, MODEL))
            await asyncio.sleep(0)
            there.append(reading.done())
            call, prompt = await reading
            same_call, same_prompt = read_call(Endpoint.CHAT, body, MODEL, PromptMemory(text_tokenizer()))
            assert (prompt.hashes, prompt.digest) == (same_prompt.hashes, same_prompt.digest)
            assert call.body({}) == same_call.body({})
        # The first few are compared with the whole, which takes longer.
        assert there == [False] * 5 + [True] * 2 + [False] * 2
        assert len(body) > LONG_BODY_BYTES
        assert children() == before
    finally:
        await reads.close()


@on_loop
async def test_a_process_that_has_come_to_distrust_its_encoder_is_believed_and_replaced() -> None:
    pytest.importorskip("fastokens")
    before, told = children(), list[str]()
    tasks, tokenizer = TaskSet(lambda name: pytest.fail(name)), text_tokenizer()
    body = long_body("hello there", LONGER_BODY_BYTES)
    tokenizer.encoder.hasten()
    tokenizer.encoder.report_to(told.append)
    reads = PromptReader(tokenizer, tasks)
    try:
        prompts = [(await reads.read(Endpoint.COMPLETIONS, body, MODEL))[1]]
        (pid,) = children() - before
        assert tokenizer.encoder.is_fast  # and so is that of the process, or it would have said why not
        tokenizer.encoder.distrust("differs", "what another process said")
        prompts.append((await reads.read(Endpoint.COMPLETIONS, body, MODEL))[1])
        assert pid not in children()
        assert told == ["differs"]
        assert prompts == [read_call(Endpoint.COMPLETIONS, body, MODEL, PromptMemory(text_tokenizer()))[1]] * 2
    finally:
        await tasks.join(60.0)
        await reads.close()


def test_a_process_that_does_not_end_keeps_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck: list[subprocess.Popen[bytes]] = []
    wait = subprocess.Popen.wait

    def waits(process: "subprocess.Popen[bytes]", timeout: float | None = None) -> int:
        if not stuck:
            stuck.append(process)
            raise subprocess.TimeoutExpired("reads bodies", timeout or 0.0)
        return wait(process, timeout)

    @on_loop
    async def scenario() -> None:
        before = children()
        async with reader() as reads:
            bodies = [reads.read(Endpoint.COMPLETIONS, long_body(word), MODEL) for word in ("a", "b")]
            await asyncio.gather(*bodies)
            assert len(children() - before) == 2
            monkeypatch.setattr(subprocess.Popen, "wait", waits)
        assert children() - before == {stuck[0].pid}, "dead, and not waited for"
        wait(stuck[0])

    scenario()


def test_who_gives_up_while_a_process_is_spawned_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    spawned: list[int] = []
    really_spawn = gateway.prompt.reader_pool.spawn

    def slowly(stdin: socket.socket, blueprint: int) -> "subprocess.Popen[bytes]":
        go_on.wait(60.0)
        assert stdin.fileno() >= 0, "still open"
        process = really_spawn(stdin, blueprint)
        spawned.append(process.pid)
        return process

    @on_loop
    async def scenario() -> None:
        before = children()
        async with reader(timeout_s=0.01) as reads:
            with pytest.raises(ReaderDied):
                await reads.read(Endpoint.COMPLETIONS, long_body("a"), MODEL)
            go_on.set()
            await until(lambda: spawned)
            await until(lambda: children() == before)

    monkeypatch.setattr(gateway.prompt.reader_pool, "spawn", slowly)
    scenario()


@on_loop
async def test_long_bodies_of_text_need_no_process_and_those_of_many_values_do() -> None:
    before = children()
    text = json.dumps({"model": "m", "prompt": "hello there " * 20_000, "max_tokens": 1}).encode()
    ids = json.dumps({"model": "m", "prompt": [1, 2] * 30_000, "max_tokens": 1}).encode()
    values = json.dumps({"model": "m", "prompt": "x", "unknown": ["y"] * 60_000}).encode()
    async with reader() as reads:
        assert (await reads.read(Endpoint.COMPLETIONS, text, MODEL))[1].num_tokens > 1
        call, prompt = await reads.read(Endpoint.COMPLETIONS, ids, MODEL)
        assert prompt.num_tokens == 60_000
        assert json.loads(call.body({}))["prompt"] == [1, 2] * 30_000
        assert children() == before
        assert (await reads.read(Endpoint.COMPLETIONS, values, MODEL))[1].num_tokens == 1
        assert len(children() - before) == 1


@on_loop
async def test_the_first_long_body_finds_a_process_that_is_there() -> None:
    before = children()
    async with reader() as reads:
        await reads.warm(60.0)
        (pid,) = children() - before
        assert reads.num_idle == 1
        await reads.read(Endpoint.COMPLETIONS, long_body("a"), MODEL)
        assert children() - before == {pid}
        os.kill(pid, signal.SIGSTOP)  # a second body waits for no stopped one: another process is started
        stuck = asyncio.create_task(reads.read(Endpoint.COMPLETIONS, long_body("b"), MODEL))
        await until(lambda: reads.num_idle == 0)
        assert (await reads.read(Endpoint.COMPLETIONS, long_body("c"), MODEL))[1].num_tokens
        os.kill(pid, signal.SIGCONT)
        assert (await stuck)[1].num_tokens


@on_loop
async def test_a_process_that_ended_is_replaced_before_the_next_body_comes() -> None:
    before = children()
    async with reader() as reads:
        await reads.warm(60.0)
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)
        asking = asyncio.create_task(reads.read(Endpoint.COMPLETIONS, long_body("b"), MODEL))
        await until(lambda: reads.num_idle == 0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ReaderDied):
            await asking
        await until(lambda: reads.num_idle == 1)


@on_loop
async def test_a_short_body_passes_the_long_ones_of_another_tenant_and_its_own() -> None:
    heavy, light = TenantShare("heavy"), TenantShare("light")
    async with reader() as reads:
        held = threading.Event()
        blocked = [asyncio.ensure_future(reads.think(lambda _: held.wait(60.0), heavy)) for _ in range(2)]
        await asyncio.sleep(0)
        order: list[str] = []

        async def read(name: str, share: TenantShare, size: int) -> None:
            body = json.dumps({"model": "m", "prompt": "hello " * (size // 6)}).encode()
            await reads.read(Endpoint.COMPLETIONS, body, MODEL, share=share, check=lambda: order.append(name))

        waiting = [asyncio.ensure_future(read("heavy long", heavy, 60_000)) for _ in range(20)]
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(read("heavy short", heavy, 8_000)))
        waiting.append(asyncio.ensure_future(read("light short", light, 8_000)))
        await asyncio.sleep(0)
        held.set()
        await asyncio.gather(*blocked, *waiting)
    assert sorted(order[:3]) == ["heavy long", "heavy short", "light short"]


@on_loop
async def test_a_client_that_leaves_while_it_waits_takes_no_place() -> None:
    async with reader() as reads:
        held = threading.Event()
        blocked = [asyncio.ensure_future(reads.think(lambda _: held.wait(60.0))) for _ in range(2)]
        await asyncio.sleep(0)
        left = asyncio.ensure_future(reads.read(Endpoint.COMPLETIONS, long_body("a", 100_000), MODEL))
        await asyncio.sleep(0)
        left.cancel()
        blocked[0].cancel()  # its thread still works, and is still taken
        await asyncio.gather(left, blocked[0], return_exceptions=True)
        late = asyncio.ensure_future(reads.think(lambda _: "late"))
        await asyncio.sleep(0)
        assert not late.done()
        held.set()
        assert await late == "late"
        await blocked[1]


@on_loop
async def test_bodies_that_wait_are_bounded() -> None:
    tasks = TaskSet(lambda name: pytest.fail(name))
    reads = PromptReader(text_tokenizer(), tasks, max_bytes=100_000)
    held = threading.Event()
    blocked = [
        asyncio.ensure_future(reads.think(lambda _: held.wait(60.0), TenantShare("acme"), 20_000)) for _ in range(2)
    ]
    await asyncio.sleep(0)
    try:
        body = long_body("a", 20_000)
        with pytest.raises(Overloaded, match="acme") as refusal:
            await reads.read(Endpoint.COMPLETIONS, body, MODEL, share=TenantShare("acme"))
        assert (refusal.value.status, refusal.value.code) == (429, "reading_overload")
        other = asyncio.ensure_future(reads.read(Endpoint.COMPLETIONS, body, MODEL, share=TenantShare("beta")))
        await asyncio.sleep(0)
        held.set()
        assert (await other)[1].num_tokens
        assert (await reads.read(Endpoint.COMPLETIONS, body, MODEL, share=TenantShare("acme")))[1].num_tokens
    finally:
        held.set()
        await asyncio.gather(*blocked)
        await reads.close()


@on_loop
async def test_a_long_body_is_held_until_it_has_been_read_and_no_longer_than_its_client_waits_for_that() -> None:
    before = children()
    tasks = TaskSet(lambda name: pytest.fail(name))
    reads = PromptReader(text_tokenizer(), tasks, threads=1, max_bytes=5 * LONG_BODY_BYTES // 2)
    body = long_body("a")
    try:
        await reads.warm(60.0)
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)
        asked, waiting = (asyncio.ensure_future(reads.read(Endpoint.COMPLETIONS, body, MODEL)) for _ in range(2))
        await until(lambda: reads.num_idle == 0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: len(tasks) == 1)
        asked.cancel()
        await asyncio.wait([asked])
        last = asyncio.ensure_future(reads.read(Endpoint.COMPLETIONS, body, MODEL))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):  # the process still has the one, and the other waits
            await reads.read(Endpoint.COMPLETIONS, body, MODEL)
        os.kill(pid, signal.SIGCONT)
        assert (await last)[1].num_tokens
        await tasks.join(60.0)
        assert (await reads.read(Endpoint.COMPLETIONS, body, MODEL))[1].num_tokens
    finally:
        await tasks.join(60.0)
        await reads.close()


@on_loop
async def test_a_process_believes_what_has_been_found_out_about_the_fast_encoder() -> None:
    pytest.importorskip("fastokens")
    tasks, tokenizer = TaskSet(lambda name: pytest.fail(name)), text_tokenizer()
    tokenizer.encoder.hasten()
    assert tokenizer.encoder.verdict is not None
    # What it would never find out itself.
    tokenizer.encoder.verdict = replace(tokenizer.encoder.verdict, why_plain="told")
    told: list[str] = []
    tokenizer.encoder.report_to(told.append)
    reads = PromptReader(tokenizer, tasks)
    try:
        await reads.read(Endpoint.COMPLETIONS, long_body("hello there", LONGER_BODY_BYTES), MODEL)
        assert told == ["told"]
    finally:
        await tasks.join(60.0)
        await reads.close()


@on_loop
async def test_where_tokens_may_be_a_list_again_longer_texts_go_to_a_process() -> None:
    pytest.importorskip("fastokens")
    before, tasks, tokenizer = children(), TaskSet(lambda name: pytest.fail(name)), text_tokenizer()
    tokenizer.encoder = TextEncoder(bpe(), most_chars=0)
    tokenizer.encoder.hasten()
    reads = PromptReader(tokenizer, tasks)
    try:
        for word, started in (("hello", 0), ("x" * 100, 0), ("hello", 1)):  # the second one has long words
            await reads.read(Endpoint.COMPLETIONS, long_body(word, LONG_BODY_BYTES + 1000), MODEL)
            assert len(children() - before) == started
        assert tokenizer.encoder.is_fast
    finally:
        await tasks.join(60.0)
        await reads.close()
