"""Where a body is read: on the loop, in a thread or in a process that may die, be slow, or have to wait."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

import gateway.prompt.reader_pool
from gateway.api.openai import Endpoint
from gateway.errors import Overloaded, ReaderDied
from gateway.prompt.prompt import Hashing, PromptMemory, read_call
from gateway.prompt.reader import LONG_BODY_BYTES, LONGER_BODY_BYTES, PromptReader
from gateway.prompt.reader_queue import ReadingRoom
from gateway.tasks import TaskSet
from planner.decisions.admission.waiting import TenantShare
from prompts.tokens.encoder import TextEncoder
from tests.gateway.worlds import model_of, on_loop, until
from tests.prompts.builders import bpe, text_tokenizer

pytestmark = pytest.mark.long

HASHING = Hashing(block_size=16, salt=b"salt")
MODEL = model_of(HASHING)


@asynccontextmanager
async def reader(timeout_s: float = 120.0) -> AsyncIterator[PromptReader]:
    tasks = TaskSet(lambda name: pytest.fail(name))
    made = PromptReader(text_tokenizer(), tasks, timeout_s=timeout_s)
    try:
        yield made
    finally:
        await tasks.join(60.0)
        await made.close()


def long_body(word: str, size: int = LONG_BODY_BYTES) -> bytes:
    return json.dumps({"model": "m", "prompt": (f"{word} " * size)[:size], "max_tokens": 1}).encode()


@on_loop
async def test_a_client_that_leaves_does_not_spoil_the_next_answer() -> None:
    async with reader() as reads:
        first = asyncio.create_task(reads.read(Endpoint.COMPLETIONS, long_body("hello"), MODEL))
        await asyncio.sleep(0)
        first.cancel()
        _, prompt = await reads.read(Endpoint.COMPLETIONS, long_body("there"), MODEL)
    assert prompt == read_call(Endpoint.COMPLETIONS, long_body("there"), MODEL, PromptMemory(text_tokenizer()))[1]


def children() -> set[int]:
    """Of this process: those of single threads go from one to another when a thread ends."""
    return {int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if _parent_of(stat) == os.getpid()}


def _parent_of(stat: Path) -> int:
    with contextlib.suppress(OSError):  # it has ended since
        return int(stat.read_text().rpartition(")")[2].split()[1])
    return 0


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


async def taken(
    reads: PromptReader,
    held: threading.Event,
    share: TenantShare,
    sizes: Sequence[int] = (200_000, 200_000, 60_000, 8_000),
) -> list[asyncio.Future[bool]]:
    """Has a thread at work for each size until `held` is set: in every place there is, those of shorter classes, too."""
    begun = list[bool]()

    def hold(_: PromptMemory) -> bool:
        begun.append(True)
        return held.wait(60.0)

    blocked = [asyncio.ensure_future(reads.think(hold, share, size)) for size in sizes]
    await until(lambda: len(begun) == len(sizes))
    return blocked


@on_loop
async def test_a_short_body_passes_the_long_ones_of_another_tenant_and_its_own() -> None:
    heavy, light = TenantShare("heavy"), TenantShare("light")
    async with reader() as reads:
        held = threading.Event()
        blocked = await taken(reads, held, heavy)
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
    assert {"heavy short", "light short"} < set(order[:4])


@on_loop
async def test_a_short_body_is_read_while_long_ones_take_all_other_places() -> None:
    async with reader() as reads:
        held = threading.Event()
        blocked = await taken(reads, held, TenantShare("heavy"), (200_000, 200_000))
        waiting = [asyncio.ensure_future(reads.read(Endpoint.COMPLETIONS, long_body("a", 200_000), MODEL))]
        await asyncio.sleep(0)
        for size in (8_000, 60_000):
            body = long_body("b", size)
            assert (await reads.read(Endpoint.COMPLETIONS, body, MODEL, share=TenantShare("light")))[1].num_tokens
        assert not waiting[0].done()
        held.set()
        await asyncio.gather(*blocked, *waiting)


@on_loop
async def test_a_client_that_leaves_while_it_waits_takes_no_place() -> None:
    async with reader() as reads:
        held = threading.Event()
        blocked = await taken(reads, held, TenantShare())
        left = asyncio.ensure_future(reads.read(Endpoint.COMPLETIONS, long_body("a", 200_000), MODEL))
        await asyncio.sleep(0)
        left.cancel()
        blocked[0].cancel()  # its thread still works, and is still taken
        await asyncio.gather(left, blocked[0], return_exceptions=True)
        late = asyncio.ensure_future(reads.think(lambda _: "late"))
        done, _ = await asyncio.wait([late], timeout=0.2)
        assert not done
        held.set()
        assert await late == "late"
        await asyncio.gather(*blocked[1:])


@on_loop
async def test_bodies_that_wait_are_bounded() -> None:
    tasks = TaskSet(lambda name: pytest.fail(name))
    reads = PromptReader(text_tokenizer(), tasks, room=ReadingRoom(100_000))
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
        await asyncio.gather(*blocked)
        assert (await reads.read(Endpoint.COMPLETIONS, body, MODEL, share=TenantShare("acme")))[1].num_tokens
    finally:
        held.set()
        await asyncio.gather(*blocked)
        await reads.close()


@on_loop
async def test_a_long_body_is_held_until_it_has_been_read_and_no_longer_than_its_client_waits_for_that() -> None:
    before = children()
    tasks = TaskSet(lambda name: pytest.fail(name))
    reads = PromptReader(text_tokenizer(), tasks, threads=1, room=ReadingRoom(5 * LONG_BODY_BYTES // 2))
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


@on_loop
async def test_closing_waits_for_what_a_thread_does_for_a_client_that_has_left_and_holds_up_nothing_else() -> None:
    reads, may_end = PromptReader(text_tokenizer(), TaskSet(lambda name: None)), threading.Event()
    (asked,) = await taken(reads, may_end, TenantShare(), (1,))
    asked.cancel()
    closing = asyncio.create_task(reads.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    may_end.set()
    await closing
