"""An engine that is stopped, or does not answer, is noticed; one that is only slow, or looked at by a debugger, is not."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc.aio
import pytest
from aiohttp import web

from node.engine.liveness import LOOK_S, SILENCE_S, LivenessTimes, Pulse, Silence, Vigil, ask, is_stopped
from tests.node.running import BLOCK, config, new_runner, running_node, until
from transport.control.proto import node_pb2 as pb


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def looking(felt: Pulse, clock: Clock, seconds: float) -> None:
    """Looks once a second at a process that runs."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        felt.looked(is_stopped=False)


def test_two_looks_at_a_stopped_process_are_a_sign_and_one_is_none() -> None:
    felt = Pulse(Clock())
    felt.looked(is_stopped=True)
    assert felt.silence() is None
    felt.looked(is_stopped=False)
    felt.looked(is_stopped=True)
    assert felt.silence() is None
    felt.looked(is_stopped=True)
    assert felt.silence() is Silence.STOPPED
    felt.looked(is_stopped=False)
    assert felt.silence() is None


def test_an_answer_has_its_time_however_often_it_is_asked_for() -> None:
    clock = Clock()
    felt = Pulse(clock)
    felt.asked()
    looking(felt, clock, SILENCE_S - 1)
    felt.asked()
    assert felt.silence() is None
    looking(felt, clock, 1)
    assert felt.silence() is Silence.UNANSWERED
    felt.answered()
    assert felt.silence() is None


def test_who_was_not_there_himself_has_missed_no_answer() -> None:
    clock = Clock()
    felt = Pulse(clock)
    felt.asked()
    clock.now += 3600.0
    felt.looked(is_stopped=False)
    assert felt.silence() is None
    looking(felt, clock, SILENCE_S)
    assert felt.silence() is Silence.UNANSWERED


@contextmanager
def parent_and_child() -> Iterator[tuple[int, int]]:
    """A process that has started another one."""
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            yield parent.pid, child
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


def test_an_engine_is_all_that_it_has_started() -> None:
    with parent_and_child() as (parent, child):
        assert not is_stopped(parent)
        for each in (parent, child):
            os.kill(each, signal.SIGSTOP)
            while not is_stopped(parent):
                os.sched_yield()
            os.kill(each, signal.SIGCONT)
            while is_stopped(parent):
                os.sched_yield()
    assert not is_stopped(parent)  # it is gone


@asynccontextmanager
async def server(gate: asyncio.Event) -> AsyncIterator[str]:
    """Gives no answer until the gate is open; its address."""

    async def health(_: web.Request) -> web.Response:
        await gate.wait()
        return web.Response(status=503)

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://127.0.0.1:{}".format(*runner.addresses[0][1:2])
    finally:
        await runner.cleanup()


def test_a_server_that_answers_nobody_is_silent_until_it_answers() -> None:
    times = LivenessTimes(look_s=0.01, ask_s=0.01, silence_s=0.5)

    async def scenario() -> None:
        heard: asyncio.Queue[Silence | None] = asyncio.Queue()
        gate, loop = asyncio.Event(), asyncio.get_running_loop()
        async with server(gate) as url, asyncio.timeout(60.0):
            vigil = Vigil(loop.time, lambda: heard.put_nowait(vigil.silence), times=times)
            watching = asyncio.create_task(vigil.watch(url, lambda: None))
            assert await heard.get() is Silence.UNANSWERED
            gate.set()
            assert await heard.get() is None
            watching.cancel()
            assert vigil.counts[Silence.UNANSWERED] >= 1

    asyncio.run(scenario())


def test_an_engine_that_is_gone_is_not_silent_whatever_the_last_look_says() -> None:
    # A look in every step of the loop: some come between the end and its news.
    times = LivenessTimes(look_s=0.0, silence_s=-1.0)

    async def scenario() -> None:
        heard: asyncio.Queue[Silence | None] = asyncio.Queue()
        async with server(asyncio.Event()) as url, asyncio.timeout(60.0):
            vigil = Vigil(asyncio.get_running_loop().time, lambda: heard.put_nowait(vigil.silence), times=times)
            watching = asyncio.create_task(vigil.watch(url, lambda: None))
            assert await heard.get() is Silence.UNANSWERED
            vigil.end()
            watching.cancel()
            await asyncio.wait([watching])
            assert (vigil.silence, vigil.counts[Silence.UNANSWERED], heard.qsize()) == (None, 1, 0)

    asyncio.run(scenario())


class NotingPulse(Pulse):
    """Says when it has been answered."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.was_answered = asyncio.Event()

    def answered(self) -> None:
        super().answered()
        self.was_answered.set()


def test_a_closed_door_is_an_answer() -> None:
    async def scenario() -> None:
        felt = NotingPulse()
        asking = asyncio.create_task(ask("http://127.0.0.1:1", felt))
        async with asyncio.timeout(60.0):
            await felt.was_answered.wait()
        asking.cancel()
        await asyncio.wait([asking])

    asyncio.run(scenario())


def test_a_look_at_hundreds_of_threads_does_not_hold_the_event_loop() -> None:
    async def scenario() -> None:
        loop, looking, has_turned, held = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []

        def look(_: int) -> bool:
            loop.call_soon_threadsafe(looking.set)
            held.append(not has_turned.wait(60.0))
            return False

        vigil = Vigil(loop.time, lambda: None, times=LivenessTimes(look_s=0.0), is_stopped=look)
        watching = asyncio.create_task(vigil.watch("http://127.0.0.1:1", os.getpid))
        await looking.wait()
        has_turned.set()
        async with asyncio.timeout(60.0):
            while not held:  # noqa: ASYNC110 a thread says so
                await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.wait([watching])
        assert not any(held)

    asyncio.run(scenario())


def test_a_node_says_that_its_engine_is_stopped_and_that_it_is_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        times = LivenessTimes(look_s=0.05)
        async with asyncio.timeout(100.0), running_node(config(tmp_path), liveness=times) as node:
            engine = (await node.describe()).engine_pid

            async def is_silent() -> bool:
                return (await node.describe()).state == pb.NODE_STATE_ENGINE_SILENT

            async def is_back() -> bool:
                return (await node.describe()).state == pb.NODE_STATE_READY

            os.kill(engine, signal.SIGSTOP)
            await until(is_silent)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await node.stub.Reserve(pb.ReserveRequest(num_tokens=BLOCK, block_hashes=bytes(32), tokens_digest=b"d"))
            assert dict(refused.value.trailing_metadata() or ())["prfaas-reason"] == "engine_silent"
            _, told = await node.get("/metrics")
            assert 'prfaas_engine_silences_total{cluster="west",kind="stopped"} 1.0' in told
            os.kill(engine, signal.SIGCONT)
            await until(is_back)
            assert await node.prefill(list(range(6 * BLOCK))) == 0
            assert (await node.describe()).engine_pid == engine

    with new_runner() as runner:
        runner.run(scenario())


def test_an_engine_that_stays_stopped_is_killed_and_another_one_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        times = LivenessTimes(look_s=0.05, kill_s=0.2)
        async with asyncio.timeout(100.0), running_node(config(tmp_path), liveness=times) as node:
            stopped = (await node.describe()).engine_pid

            async def another_one_serves() -> bool:
                told = await node.describe()
                return told.state == pb.NODE_STATE_READY and told.engine_pid != stopped

            os.kill(stopped, signal.SIGSTOP)
            await until(another_one_serves)
            assert await node.prefill(list(range(6 * BLOCK))) == 0

    with new_runner() as runner:
        runner.run(scenario())


def test_time_in_which_nobody_looked_is_no_silence() -> None:
    now = [0.0]
    seen = Pulse(lambda: now[0])

    def look(after_s: float, *, is_stopped: bool = True) -> float:
        now[0] += after_s
        seen.looked(is_stopped=is_stopped)
        return seen.silent_s

    assert [look(1.0), look(1.0), look(1.0), look(3600.0)] == [0.0, 1.0, 2.0, 2.0 + 2 * LOOK_S]
    assert look(1.0, is_stopped=False) == 0.0
