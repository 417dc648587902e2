"""The link between vLLM's scheduler, its workers and the agent: two ranks, a real socket on either side."""

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest

from engine.vllm.scheduler_side.agent import VllmAgentThread, agent_socket
from engine.vllm.scheduler_side.errands import Arrived, ErrandFailed, ErrandWritten, Granted
from engine.vllm.scheduler_side.steps import LayerWritten, SaveFailed, StateWritten, StepWritten
from engine.vllm.worker_side.ranks import RankLink
from tests.engine.mini_agent import SALT, MiniAgent
from tests.engine.running import until
from tests.engine.vllm.builders import BLOCK, full, layout_of, state
from transport.control import messages as m

N = 2 * BLOCK + 1
PROMPT = list(range(N + 1))
LAYOUT = layout_of(full("a", part_bytes=32 * BLOCK, parts=2), state("s", table=1, part_bytes=150, parts=2), ranks=2)


class Engine:
    """The thread, its two ranks, and all events so far."""

    def __init__(self, agent: MiniAgent) -> None:
        self.thread = VllmAgentThread(agent.socket, LAYOUT, model_id="m", max_model_len=100, http_url="http://here")
        self.thread.start()
        self.released: list[tuple[int, str]] = []
        self.ranks = [
            RankLink(str(self.thread.rank_socket), rank, lambda job, rank=rank: self.released.append((rank, job)))
            for rank in range(2)
        ]
        self.events = []

    async def next(self, kind):
        """The first event of a kind."""

        def seen() -> bool:
            self.events += self.thread.poll()
            return any(isinstance(event, kind) for event in self.events)

        await until(seen)
        return next(event for event in self.events if isinstance(event, kind))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.thread.close()


def run(folder: Path, scenario):
    async def main():
        agent = MiniAgent(folder, LAYOUT.model, num_pages=64)
        await agent.start()
        engine = Engine(agent)
        try:
            await until(lambda: engine.thread.connected)
            await scenario(agent, engine)
        finally:
            await asyncio.to_thread(engine.close)
            with contextlib.suppress(asyncio.CancelledError):
                await agent.stop()

    asyncio.run(main())
    gc.collect()  # loops and links refer to each other, and so keep the arena mapped until they are collected


def heard(agent, kind):
    return [message for message in agent.heard if isinstance(message, kind)]


def test_the_socket_of_ranks_goes_with_the_agents_directory_and_is_no_longer_than_its_own(tmp_path):
    paths = []

    async def scenario(agent, engine):
        paths.append(engine.thread.rank_socket)
        assert paths[0].is_socket()
        assert (paths[0].parent, len(paths[0].name)) == (agent.socket.parent, len("engine.sock"))

    run(tmp_path, scenario)
    assert not paths[0].exists()


def test_a_layer_is_announced_when_every_rank_has_written_it(tmp_path):
    async def scenario(agent, engine):
        errand = engine.thread.begin("r", PROMPT, N, SALT, None)
        job = (await engine.next(Granted)).pages.job
        engine.ranks[0].send(LayerWritten(job=job, group=0, layer=0, num_tokens=BLOCK))
        engine.ranks[0].send(LayerWritten(job=job, group=0, layer=0, num_tokens=N))
        engine.ranks[1].send(LayerWritten(job=job, group=0, layer=0, num_tokens=BLOCK))
        await until(lambda: heard(agent, m.LayerDone))
        assert [message.num_tokens for message in heard(agent, m.LayerDone)] == [BLOCK]
        for rank in engine.ranks:
            rank.send(LayerWritten(job=job, group=0, layer=0, num_tokens=N))
            rank.send(StateWritten(job=job, group=1, layer=1, num_tokens=N))
        await until(lambda: heard(agent, m.StateDone))
        assert [message.num_tokens for message in heard(agent, m.LayerDone)] == [BLOCK, N]
        assert len(heard(agent, m.StateDone)) == 1
        engine.thread.last_step(errand, [(1, BLOCK)], computed_tokens=BLOCK, so_far_s=2.0)
        engine.ranks[0].send(StepWritten(job=job, num_tokens=N))
        engine.ranks[1].send(StepWritten(job=job, num_tokens=BLOCK))
        engine.ranks[1].send(StepWritten(job=job, num_tokens=N))
        assert (await engine.next(ErrandWritten)).errand == errand
        await until(lambda: heard(agent, m.PrefillDone))
        (done,) = heard(agent, m.PrefillDone)
        assert (done.num_tokens, done.unfilled, done.computed_tokens) == (N, ((1, BLOCK),), BLOCK)
        assert 2.0 <= done.compute_s < 60.0
        engine.thread.end(errand)
        await until(lambda: agent.ended)

    run(tmp_path, scenario)


def test_pages_go_back_when_all_ranks_have_let_go(tmp_path):
    async def scenario(agent, engine):
        errand = engine.thread.begin("r", PROMPT, N, SALT, None)
        job = (await engine.next(Granted)).pages.job
        engine.thread.end(errand, reason="aborted")
        await until(lambda: agent.ended)
        assert sorted(engine.released) == [(0, job), (1, job)]
        assert agent.ended[0].reason == "aborted"

    run(tmp_path, scenario)


def test_a_rank_that_is_gone_keeps_nothing_from_going_back(tmp_path):
    async def scenario(agent, engine):
        errand = engine.thread.begin("r", PROMPT, N, SALT, None)
        await engine.next(Granted)
        await asyncio.to_thread(engine.ranks[1].close)
        engine.thread.end(errand)
        await until(lambda: agent.ended)

    run(tmp_path, scenario)


def test_tickets_for_other_layouts_or_tokens_are_refused_before_anything_is_asked(tmp_path):
    async def scenario(agent, engine):
        ticket = agent.reserve("t", PROMPT)
        engine.thread.begin("r", [*PROMPT[:-1], 99], N, SALT, ticket)
        assert (await engine.next(ErrandFailed)).reason == "digest_mismatch"
        assert not heard(agent, m.BeginPrefill)

    run(tmp_path, scenario)


def test_what_the_agent_refuses_is_an_event(tmp_path):
    async def scenario(agent, engine):
        agent.refuse = "no_capacity"
        engine.thread.begin("r", PROMPT, N, SALT, None)
        assert (await engine.next(ErrandFailed)).reason == "no_capacity"

    run(tmp_path, scenario)


def test_a_rank_that_cannot_write_fails_the_errand(tmp_path):
    async def scenario(agent, engine):
        errand = engine.thread.begin("r", PROMPT, N, SALT, None)
        job = (await engine.next(Granted)).pages.job
        engine.ranks[0].send(SaveFailed(job=job, reason="OSError"))
        failed = await engine.next(ErrandFailed)
        assert (failed.errand, failed.reason) == (errand, "save_failed")
        for rank in engine.ranks:  # their step ends all the same
            rank.send(StepWritten(job=job, num_tokens=N))
        engine.thread.end(errand, reason="save_failed")
        await until(lambda: agent.ended)
        assert not heard(agent, m.PrefillDone), "a block that was not written is not prefix cache"

    run(tmp_path, scenario)


def test_a_layer_that_no_rank_has_written_is_never_committed(tmp_path):
    """Whatever ranks say of a step: its blocks would be sent, and decoded from, with what their pages held before."""

    async def scenario(agent, engine):
        engine.thread.begin("r", PROMPT, N, SALT, None)
        job = (await engine.next(Granted)).pages.job
        engine.ranks[0].send(LayerWritten(job=job, group=0, layer=0, num_tokens=N))
        for rank in engine.ranks:
            rank.send(StepWritten(job=job, num_tokens=N))
        assert (await engine.next(ErrandFailed)).reason == "save_failed"
        assert not heard(agent, m.PrefillDone)

    run(tmp_path, scenario)


def test_all_pages_are_let_go_before_a_lost_agent_is_left(tmp_path):
    async def scenario(agent, engine):
        engine.thread.begin("r", PROMPT, N, SALT, None)
        job = (await engine.next(Granted)).pages.job
        await agent.stop()
        assert (await engine.next(ErrandFailed)).reason == "agent_gone"
        await until(lambda: len(engine.released) == 2)
        assert sorted(engine.released) == [(0, job), (1, job)]

    run(tmp_path, scenario)


def test_a_cached_leg_is_delivered_without_a_write(tmp_path):
    async def scenario(agent, engine):
        agent.peers["decode"] = agent  # a loopback: what it "sends" lands in its own reservation
        ticket = agent.reserve("t", PROMPT)
        errand = engine.thread.begin("r", PROMPT, N, SALT, ticket)
        await engine.next(Granted)
        engine.thread.complete(errand)
        assert (await engine.next(Arrived)).outcome.ok
        (done,) = heard(agent, m.PrefillDone)
        assert (done.computed_tokens, done.compute_s) == (0, 0.0)

    run(tmp_path, scenario)


def test_a_connector_without_a_socket_says_what_to_set(monkeypatch):
    monkeypatch.delenv("PRFAAS_AGENT_SOCKET", raising=False)
    with pytest.raises(ValueError, match="agent_socket in kv_connector_extra_config"):
        agent_socket(None)
    assert agent_socket("/run/x") == Path("/run/x")
