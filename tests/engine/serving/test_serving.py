"""Requests through the HTTP surface of engines that share a node with an agent."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest

from engine.emulated.emulated import emulated_tokens
from engine.torch.reference import reference_tokens
from tests.engine.builders import random_tokens
from tests.engine.mini_agent import SALT, MiniAgent
from tests.engine.running import PATIENCE_S, decode_leg, emulated, prefill_leg, running, until
from transport.control import messages as m

pytestmark = pytest.mark.long

LOCAL = {"salt": SALT.hex()}


@contextlib.asynccontextmanager
async def agent_for(engine, folder: Path, **options):
    agent = MiniAgent(folder, engine.layout, **options)
    await agent.start()
    try:
        yield agent
        # EndJob of the last request may still be in the socket.
        await until(lambda: not agent.cache.report().reservations)
        agent.cache.check_integrity()
    finally:
        await agent.stop()


@contextlib.asynccontextmanager
async def pair(engines, folder: Path):
    """A prefill node and a decode node."""
    async with agent_for(engines[0], folder / "p") as p, agent_for(engines[1], folder / "d") as d:
        p.peers["decode"] = d
        async with running(engines[0], p) as prefill, running(engines[1], d) as decode:
            yield prefill, decode, d


async def remote(prefill, decode, agent, prompt, count, transfer_id="t"):
    ticket = agent.reserve(transfer_id, prompt)
    (status, leg), (_, answer) = await asyncio.gather(
        prefill.post(prompt=prompt, max_tokens=1, kv_transfer_params=prefill_leg(ticket)),
        decode.post(prompt=prompt, max_tokens=count, kv_transfer_params=decode_leg(transfer_id)),
    )
    assert status == 200, leg
    return leg, answer


@pytest.mark.rotating
@pytest.mark.parametrize("length", [2, 64, 65, 66, 129, 700])
@pytest.mark.parametrize("arch", ["kimi_linear", "gemma3", "llama"])
def test_two_emulated_nodes_hand_over(arch, length, tmp_path):
    async def scenario():
        async with pair((emulated(arch), emulated(arch)), tmp_path) as (prefill, decode, agent):
            prompt = random_tokens(length)
            leg, answer = await remote(prefill, decode, agent, prompt, 20)
            assert answer["choices"][0]["token_ids"] == emulated_tokens(prompt, 20)
            assert "kv_transfer_params" not in answer
            params = leg["kv_transfer_params"]
            assert (params["delivered"], params["num_tokens"]) == (True, length - 1)
            assert leg["choices"][0]["text"] == ""

    asyncio.run(scenario())


@pytest.mark.rotating
@pytest.mark.dimensions(arch=None)
@pytest.mark.parametrize("arch", ["kimi_linear", "gemma3"])
def test_two_real_nodes_hand_over(arch, engine_of, tmp_path):
    engine = engine_of(arch)

    async def scenario():
        async with pair((engine, engine), tmp_path) as (prefill, decode, agent):
            prompt = random_tokens(300)
            for round_ in range(2):  # the second time, both nodes have most of it in their caches
                _, answer = await remote(prefill, decode, agent, prompt, 16, f"t{round_}")
                assert answer["choices"][0]["token_ids"] == reference_tokens(engine.model, prompt, 16)

    asyncio.run(scenario())


def test_prefix_is_reused_across_requests_and_engine_restarts(tmp_path):
    prompt = random_tokens(600)

    async def ask(agent):
        async with running(emulated(), agent) as node:
            _, answer = await node.post(prompt=prompt, max_tokens=8, kv_transfer_params=LOCAL)
            assert answer["choices"][0]["token_ids"] == emulated_tokens(prompt, 8)
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent:
            assert await ask(agent) == 0
            assert await ask(agent) == 576  # 599 tokens have nine full blocks

    asyncio.run(scenario())


def test_the_agent_hears_what_was_computed_and_in_which_time(tmp_path):
    async def scenario():
        async with pair((emulated(), emulated()), tmp_path) as (prefill, decode, agent):
            await remote(prefill, decode, agent, random_tokens(300), 1)
            for _ in range(2):
                await decode.post(prompt=random_tokens(600), max_tokens=1, kv_transfer_params=LOCAL)
            said = [message for message in agent.heard if isinstance(message, m.PrefillDone)]
            assert [done.computed_tokens for done in said] == [599, 599 - 576]
            assert all(done.compute_s >= 0.0 for done in said)

    asyncio.run(scenario())


def test_salts_do_not_share(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            prompt = random_tokens(300)
            for salt in ("00", "01"):
                _, answer = await node.post(prompt=prompt, max_tokens=1, kv_transfer_params={"salt": salt})
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["transfer_failed", "digest_mismatch", "unknown_transfer"])
def test_failed_landing_is_recomputed_and_said(reason, tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            prompt = random_tokens(200)
            if reason != "unknown_transfer":
                agent.reserve("t", prompt if reason == "transfer_failed" else prompt[::-1])
                agent.landings["t"].failed = reason
                agent.landings["t"].landed.set()
            _, answer = await node.post(prompt=prompt, max_tokens=8, kv_transfer_params=decode_leg("t"))
            assert answer["choices"][0]["token_ids"] == emulated_tokens(prompt, 8)
            assert answer["kv_transfer_params"] == {"recomputed": True, "reason": reason}
            events = await node.events(
                prompt=prompt, max_tokens=2, stream_options={"include_usage": True}, kv_transfer_params=decode_leg("x")
            )
            assert events[-1]["kv_transfer_params"] == {"recomputed": True, "reason": "unknown_transfer"}
            agent.cache.release("t", 0.0)

    asyncio.run(scenario())


def test_ticket_for_other_tokens_is_a_conflict(tmp_path):
    async def scenario():
        async with pair((emulated(), emulated()), tmp_path) as (prefill, _, agent):
            ticket = agent.reserve("t", random_tokens(100))
            status, answer = await prefill.post(
                prompt=random_tokens(99), max_tokens=1, kv_transfer_params=prefill_leg(ticket)
            )
            assert (status, answer["error"]["code"]) == (409, "digest_mismatch")
            agent.cache.release("t", 0.0)

    asyncio.run(scenario())


def test_refused_pages_cost_reuse_not_the_request(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            agent.refuse = "no_capacity"
            prompt = random_tokens(200)
            assert await node.tokens(prompt, 8) == emulated_tokens(prompt, 8)
            ticket = agent.reserve("t", prompt)
            status, answer = await node.post(prompt=prompt, max_tokens=1, kv_transfer_params=prefill_leg(ticket))
            assert (status, answer["error"]["code"]) == (503, "no_capacity")
            agent.cache.release("t", 0.0)

    asyncio.run(scenario())


def test_a_leg_whose_push_fails_does_not_compute_on(tmp_path):
    async def scenario():
        engine = emulated(prefill_per_token_s=0.02)
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            prompt = random_tokens(8000)  # 160 seconds of prefill
            ticket = agent.reserve("t", prompt)
            leg = asyncio.create_task(node.post(prompt=prompt, max_tokens=1, kv_transfer_params=prefill_leg(ticket)))
            async with asyncio.timeout(2 * PATIENCE_S):
                await until(lambda: agent.has_heard(m.LayerDone))
                job = next(message.job for message in agent.heard if isinstance(message, m.LayerDone))
                agent.send(m.Delivered(job=job, ok=False, reason="peer_lost"))
                status, answer = await leg
            assert (status, answer["error"]["code"]) == (502, "peer_lost")  # by name: a router must know it
            agent.cache.release("t", 0.0)

    asyncio.run(scenario())


def test_prefill_leg_without_agent_fails_clearly(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "d") as agent, running(emulated()) as node:
            ticket = agent.reserve("t", random_tokens(10))
            status, answer = await node.post(
                prompt=random_tokens(10), max_tokens=1, kv_transfer_params=prefill_leg(ticket)
            )
            assert (status, answer["error"]["code"]) == (502, "kv_transfer_failed")
            agent.cache.release("t", 0.0)

    asyncio.run(scenario())


def test_engine_outlives_its_agent(tmp_path):
    """Running requests finish, new ones do without reuse, a new agent is found by itself."""

    async def scenario():
        engine = emulated(prefill_per_token_s=0.001, decode_step_s=0.002)
        prompt = random_tokens(400)
        async with agent_for(engine, tmp_path / "a") as first:
            async with running(engine, first) as node:
                task = asyncio.create_task(node.tokens(prompt, 20))
                await until(lambda: first.has_heard(m.LayerDone))
                await first.stop()
                assert await task == emulated_tokens(prompt, 20)
                assert await node.tokens(prompt, 5) == emulated_tokens(prompt, 5)
                second = MiniAgent(tmp_path / "a", engine.layout)
                await second.start()
                assert await node.service.link.wait_connected(PATIENCE_S)
                assert await node.tokens(prompt, 5) == emulated_tokens(prompt, 5)
                assert second.cache.report().pages_prefix > 0
                await second.stop()
            first.release_jobs()

    asyncio.run(scenario())


@pytest.mark.parametrize("moment", [m.BeginPrefill, m.LayerDone, m.PrefillDone])
def test_client_disconnect_frees_everything(moment, tmp_path):
    """While waiting for pages, in the middle of a chunk, while decoding."""

    async def scenario():
        engine = emulated(prefill_per_token_s=0.0005, decode_step_s=0.005)
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            task = asyncio.create_task(node.events(prompt=random_tokens(500), max_tokens=4000))
            await until(lambda: agent.has_heard(moment))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not node.service.active and not agent.cache.report().reservations)
            await until(lambda: not node.service.model.load.running)

    asyncio.run(scenario())


def test_many_requests_at_once(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            prompts = [random_tokens(length, seed=7) for length in range(1, 400, 20)]
            answers = await asyncio.gather(*(node.tokens(prompt, 30) for prompt in prompts))
            assert answers == [emulated_tokens(prompt, 30) for prompt in prompts]

    asyncio.run(scenario())


def test_agent_hears_the_load(tmp_path):
    async def scenario():
        engine = emulated(prefill_per_token_s=0.001)
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            await node.tokens(random_tokens(300), 2)

            def reports():
                return [message for message in agent.heard if isinstance(message, m.LoadReport)]

            await until(lambda: any(report.queued_tokens for report in reports()))
            await until(
                lambda: (reports()[-1].running, reports()[-1].waiting, reports()[-1].queued_tokens) == (0, 0, 0)
            )
            assert reports()[-1].slots == node.service.model.slots
            assert [batch for batch, _ in reports()[-1].steps] == [1.0]

    asyncio.run(scenario())


def test_nothing_leaks_when_requests_come_and_go(tmp_path):
    """A small pool, shared prefixes, clients that leave at any time."""

    async def scenario():
        rng, base = np.random.default_rng(1), random_tokens(600)
        engine = emulated("gemma3", prefill_per_token_s=0.00005, decode_step_s=0.0002)
        async with agent_for(engine, tmp_path / "n", num_pages=120) as agent, running(engine, agent) as node:

            async def request(seed: int, start_s: float, shared: int, patience_s: float) -> None:
                await asyncio.sleep(start_s)
                prompt = base[:shared] + random_tokens(100, seed=seed)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        assert await node.tokens(prompt, 20, kv_transfer_params=LOCAL) == emulated_tokens(prompt, 20)

            await asyncio.gather(
                *(
                    request(seed, rng.random(), int(rng.integers(1, 600)), rng.choice([0.02, 0.1, 30.0]))
                    for seed in range(60)
                )
            )
            await until(lambda: not node.service.active and not node.service.link.num_jobs)

    asyncio.run(scenario())
