"""The link to the agent, and what it does with agents that misbehave."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import pytest

from engine.agent.link import AgentLink
from engine.emulated.emulated import emulated_layout
from engine.errors import AgentGone, TransferError
from tests.engine.mini_agent import MiniAgent
from tests.engine.running import PATIENCE_S, until
from transport.control import messages as m

LAYOUT = emulated_layout("llama", 64)


@contextlib.asynccontextmanager
async def linked(agent: MiniAgent, **options):
    await agent.start()
    drains = []
    link = AgentLink(
        agent.socket,
        LAYOUT,
        **{
            "model_id": "m",
            "max_model_len": 100,
            "http_url": "http://here",
            "on_welcome": lambda welcome: None,
            "on_drain": lambda: drains.append(True),
            "on_resume": lambda: drains.append(False),
            **options,
        },
    )
    link.drains = drains
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await agent.stop()


def run(folder: Path, scenario, layout=LAYOUT):
    async def main():
        agent = MiniAgent(folder, layout, num_pages=16)
        async with linked(agent) as link:
            await scenario(agent, link)

    asyncio.run(main())


def begin(link):
    return link.begin_prefill("r", b"", 10, b"d", None)


def test_hello_says_who_we_are(tmp_path):
    async def scenario(agent, link):
        assert await link.wait_connected(PATIENCE_S)
        hello = agent.heard[0]
        assert (hello.model_id, hello.http_url, hello.layout_json) == ("m", "http://here", LAYOUT.to_json())

    run(tmp_path, scenario)


def test_the_agent_says_what_names_of_blocks_start_from_and_may_say_it_anew(tmp_path):
    async def scenario(agent, link):
        assert link.block_salts == ()
        agent.block_salts = (b"a",)
        assert await link.wait_connected(PATIENCE_S)
        assert link.block_salts == (b"a",)
        agent.send(m.BlockSalts(salts=(b"b", b"a")))
        await until(lambda: link.block_salts == (b"b", b"a"))

    run(tmp_path, scenario)


def test_job_pages_are_mapped_and_given_back(tmp_path):
    async def scenario(agent, link):
        await link.wait_connected(PATIENCE_S)
        job = begin(link)
        kv = await job.pages()
        assert (kv.num_tokens, kv.cached_tokens) == (10, 0)
        job.end(reason="why not")
        job.end(reason="twice is once")
        await until(lambda: agent.ended)
        later = begin(link)
        await later.pages()  # messages keep their order: a second end would have been heard before this job began
        assert [(end.job, end.reason) for end in agent.ended] == [(job.job, "why not")]
        later.end()
        assert kv.revoked
        assert link.num_jobs == 0

    run(tmp_path, scenario)


def test_lost_agent_ends_jobs_and_is_found_again(tmp_path):
    async def scenario(agent, link):
        await link.wait_connected(PATIENCE_S)
        failures = []
        job = begin(link)
        kv = await job.pages()
        job.on_failure = failures.append
        await agent.stop()
        with pytest.raises(AgentGone):
            await job.delivered()
        assert kv.revoked
        assert [error.reason for error in failures] == ["agent_gone"]
        with pytest.raises(AgentGone):
            begin(link)
        await agent.start()
        assert await link.wait_connected(PATIENCE_S)

    run(tmp_path, scenario)


def test_hanging_up_counts_for_all_who_hold_the_connection(tmp_path):
    held = []

    async def main():
        agent = MiniAgent(tmp_path, LAYOUT, num_pages=16)
        async with linked(agent, hold=lambda descriptor: held.append(os.dup(descriptor))) as link:
            assert await link.wait_connected(PATIENCE_S)
            assert not agent.is_hung_up_on
            link_task = next(task for task in asyncio.all_tasks() if task.get_coro().__name__ == "run")
            link_task.cancel()
            await until(lambda: agent.is_hung_up_on)

    asyncio.run(main())
    os.close(*held)


def test_a_push_that_fails_is_told_at_once(tmp_path):
    async def scenario(agent, link):
        await link.wait_connected(PATIENCE_S)
        job = begin(link)
        await job.pages()
        failures = []
        job.on_failure = failures.append
        agent.send(m.Delivered(job=job.job, ok=False, reason="receiver_gone"))
        with pytest.raises(TransferError, match="receiver_gone"):
            await job.delivered()
        assert [error.reason for error in failures] == ["receiver_gone"]
        assert job.kv.revoked
        job.end()

    run(tmp_path, scenario)


def test_answers_to_forgotten_jobs_and_drains(tmp_path):
    async def scenario(agent, link):
        await link.wait_connected(PATIENCE_S)
        agent.send(m.Refused(job="nobody", reason="x"))
        agent.send(m.Drain())
        await until(lambda: link.drains)
        assert link.drains == [True]
        assert link.connected

    run(tmp_path, scenario)


def test_arena_of_another_layout_is_refused(tmp_path):
    async def scenario(agent, link):
        assert not await link.wait_connected(0.3)

    run(tmp_path, scenario, layout=emulated_layout("lfm2", 64))


def test_garbage_from_the_socket_ends_the_connection_not_the_engine(tmp_path):
    async def scenario(agent, link):
        await link.wait_connected(PATIENCE_S)
        agent.send_bytes(b"\x05\x00\x00\x00hello")
        await until(lambda: len(agent.heard) > 1)
        assert [type(message).__name__ for message in agent.heard] == ["Hello", "Hello"]

    run(tmp_path, scenario)


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_comes_with_the_agents_bytes_ends_the_link(turns, tmp_path):
    async def main():
        agent = MiniAgent(tmp_path, LAYOUT, num_pages=16)
        async with asyncio.timeout(PATIENCE_S), linked(agent):
            while not agent.heard:  # noqa: ASYNC110 every turn of the loop counts
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)

    asyncio.run(main())


def test_an_agent_that_does_not_take_us_is_asked_less_and_less_often(tmp_path):
    class Refusing(MiniAgent):
        def _hear(self, message):
            self.heard.append(message)
            self._writers[-1].close()

    async def main():
        agent, began = Refusing(tmp_path, LAYOUT, num_pages=16), time.monotonic()
        async with linked(agent):
            await until(lambda: len(agent.heard) >= 5)
            assert time.monotonic() - began >= 0.75  # after 0.05, 0.1, 0.2, 0.4 s

    asyncio.run(main())


def test_a_fault_of_our_own_costs_a_connection_not_the_link(tmp_path, caplog):
    faults = [ZeroDivisionError("of a welcome")]

    def welcome(message):
        if faults:
            raise faults.pop()

    async def main():
        agent = MiniAgent(tmp_path, LAYOUT, num_pages=16)
        async with linked(agent, on_welcome=welcome) as link:
            await until(lambda: "of a welcome" in caplog.text)
            await until(lambda: len(agent.heard) == 2 and link.connected)
            job = begin(link)
            await job.pages()
            job.end()

    asyncio.run(main())
