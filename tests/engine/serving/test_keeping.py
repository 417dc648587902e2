"""The next turn of a conversation begins in the last answer's blocks: same tokens, nothing left behind, no request delayed."""

import asyncio

import pytest

from engine.emulated.emulated import emulated_tokens
from engine.torch.reference import reference_tokens
from engine.torch.tiny import ARCHITECTURES
from tests.engine.builders import BLOCK, random_tokens
from tests.engine.mini_agent import SALT
from tests.engine.running import Running, decode_leg, emulated, running, until
from tests.engine.serving.test_serving import agent_for, pair, remote
from transport.control import messages as m

pytestmark = pytest.mark.long

LOCAL = {"salt": SALT.hex()}
TURNS = ((200, 150), (60, 70), (64, 129), (1, 65), (310, 100))  # prompt and answer tokens; borders on all sides


async def kept(node: Running, outcome: str = "kept") -> float:
    """How many answers have come to `outcome`, by the engine's own count."""
    async with node.http.get(node.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    name = f'prfaas_engine_answers_kept_total{{outcome="{outcome}"}}'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def until_kept(node: Running, count: int, outcome: str = "kept") -> None:
    async with asyncio.timeout(60.0):
        while await kept(node, outcome) < count:  # noqa: ASYNC110 the engine's metrics have no Event
            await asyncio.sleep(0.005)


async def ask(node: Running, prompt, count: int, **params) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were cached."""
    _, answer = await node.post(prompt=list(prompt), max_tokens=count, kv_transfer_params=LOCAL | params)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def full_blocks(prompt: int, answer: int) -> int:
    """Tokens of the full blocks of a turn: its last token has no KVCache."""
    return (prompt + answer - 1) // BLOCK * BLOCK


# Linear states and windows always; the others with the equality suite.
QUICK = ("kimi_linear", "gemma3")
EACH = [arch if arch in QUICK else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]


@pytest.mark.rotating("real")
@pytest.mark.parametrize("turn", TURNS, ids=str)
@pytest.mark.parametrize("arch", EACH)
def test_a_second_turn_begins_in_the_first_answer(arch, turn, engine_of, tmp_path):
    engine, (length, count) = engine_of(arch), turn

    async def scenario():
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            first = random_tokens(length, seed=100)
            said, _ = await ask(node, first, count)
            await until_kept(node, 1)
            second = [*first, *said, *random_tokens(30, seed=200)]
            tokens, cached = await ask(node, second, 24)
            assert cached == full_blocks(length, count)
            assert tokens == reference_tokens(engine.model, second, 24)
            agent.cache.check_integrity()

    asyncio.run(scenario())


@pytest.mark.parametrize("arch", ["kimi_linear", "gemma3", "llama", "lfm2"])
def test_a_long_conversation_of_an_emulated_model(arch, tmp_path):
    async def scenario():
        engine = emulated(arch)
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            talk, had = random_tokens(100), 0
            for turn in range(8):
                expected = emulated_tokens(talk, 90)
                tokens, cached = await ask(node, talk, 90)
                assert (tokens, cached) == (expected, had)
                await until_kept(node, turn + 1)
                had = full_blocks(len(talk), 90)
                talk = [*talk, *tokens, *random_tokens(17, seed=turn)]

    asyncio.run(scenario())


@pytest.mark.rotating("real")
@pytest.mark.parametrize("arch", ["kimi_linear", "gemma3"])
def test_an_answer_after_a_landing_is_kept_where_it_was_decoded(arch, engine_of, tmp_path):
    engine = engine_of(arch)

    async def scenario():
        async with pair((engine, engine), tmp_path) as (prefill, decode, agent):
            first = random_tokens(300)
            _, answer = await remote(prefill, decode, agent, first, 100)
            await until_kept(decode, 1)
            second = [*first, *answer["choices"][0]["token_ids"], *random_tokens(30, seed=9)]
            tokens, cached = await ask(decode, second, 24)
            assert cached == full_blocks(300, 100)
            assert tokens == reference_tokens(engine.model, second, 24)

    asyncio.run(scenario())


def test_an_answer_on_top_of_quantised_kvcache_is_not_kept(tmp_path):
    """Its prompt's blocks would be those that landed: not exact, and prefix cache for everybody."""

    async def scenario():
        async with pair((emulated(), emulated()), tmp_path) as (prefill, decode, agent):
            agent.lands_exact = False
            _, answer = await remote(prefill, decode, agent, random_tokens(300), 100)
            assert answer["usage"]["completion_tokens"] == 100
            await ask(decode, random_tokens(200), 80)  # its answer is kept: what came before would be by now
            await until_kept(decode, 1)
            offered = [message for message in agent.heard if isinstance(message, m.BeginPrefill) and message.computed]
            assert [message.num_tokens for message in offered] == [full_blocks(200, 80)]

    asyncio.run(scenario())


def test_an_answer_without_a_full_block_is_nobodys_business(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            await ask(node, random_tokens(100), 28)  # 127 tokens are in the model
            await ask(node, random_tokens(100), 29)
            await until_kept(node, 1)
            offers = [each for each in agent.heard if isinstance(each, m.BeginPrefill) and each.computed]
            assert [offer.num_tokens for offer in offers] == [128]

    asyncio.run(scenario())


def test_no_room_costs_the_next_turn_and_is_counted(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            prompt = random_tokens(100)
            agent.refuse_answers = "no_capacity"
            tokens, _ = await ask(node, prompt, 100)
            await until_kept(node, 1, "no_capacity")
            second = [*prompt, *tokens, 7]
            assert await ask(node, second, 20) == (emulated_tokens(second, 20), 64)

    asyncio.run(scenario())


def test_cancelled_answers_leave_nothing(tmp_path):
    async def scenario():
        engine = emulated(decode_step_s=0.001)
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            tasks = [asyncio.create_task(ask(node, random_tokens(70, seed=n), 4000)) for n in range(5)]
            await until(lambda: node.service.model.load.running == 5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not node.service.active and not node.service.link.num_jobs)
            assert not [each for each in agent.heard if isinstance(each, m.BeginPrefill) and each.computed]

    asyncio.run(scenario())


@pytest.mark.parametrize("silent", [True, False])
def test_an_agent_that_dies_while_an_answer_is_kept(silent, tmp_path):
    """Before it has said which pages, and after."""

    async def scenario():
        engine = emulated()
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            agent.deaf_to_answers = silent
            prompt = random_tokens(100)
            tokens, _ = await ask(node, prompt, 100)
            if silent:
                await until(lambda: node.service.link.num_jobs)
                await agent.stop()
                await until_kept(node, 1, "agent_gone")
            else:
                await until_kept(node, 1)
                await agent.stop()
            assert not node.service.link.num_jobs
            assert tokens == emulated_tokens(prompt, 100)
            assert await ask(node, prompt, 20) == (emulated_tokens(prompt, 20), 0)

    asyncio.run(scenario())


def test_an_engine_that_ends_gives_up_what_it_was_keeping(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent:
            async with running(emulated(), agent) as node:
                agent.deaf_to_answers = True
                await ask(node, random_tokens(100), 100)
                await until(lambda: node.service.link.num_jobs)
            assert agent.ended[-1].reason == "aborted"

    asyncio.run(scenario())


@pytest.mark.parametrize(("outcome", "change"), [("draining", {"draining": True}), ("no_agent", {"link": None})])
def test_what_is_not_kept_says_why(outcome, change, tmp_path):
    async def scenario():
        engine = emulated(decode_step_s=0.01)
        async with agent_for(engine, tmp_path / "n") as agent, running(engine, agent) as node:
            asking = asyncio.create_task(ask(node, random_tokens(70), 100))
            await until(lambda: node.service.active)
            await until(lambda: node.service.model.load.running)
            for name, value in change.items():
                setattr(node.service, name, value)
            await asking
            await until_kept(node, 1, outcome)
            assert not node.service.link or not node.service.link.num_jobs

    asyncio.run(scenario())


def test_a_crowd_of_finished_answers_does_not_pile_up(tmp_path):
    """What ends in the model without being kept is let go at once."""

    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            agent.deaf_to_answers = True
            await asyncio.gather(*(ask(node, random_tokens(70, seed=n), 100) for n in range(20)))
            await until_kept(node, 12, "busy")
            async with asyncio.timeout(60.0):
                while node.service.link.num_jobs < 8:  # noqa: ASYNC110 some are still on their way to the agent
                    await asyncio.sleep(0.005)
            assert node.service.link.num_jobs == 8
            agent.deaf_to_answers = False

    asyncio.run(scenario())


def test_a_landing_that_failed_is_kept_all_the_same(tmp_path):
    async def scenario():
        async with agent_for(emulated(), tmp_path / "n") as agent, running(emulated(), agent) as node:
            prompt = random_tokens(200)
            tokens, _ = await ask(node, prompt, 80, **decode_leg("nobody-knows-it"))
            await until_kept(node, 1)
            second = [*prompt, *tokens, 9]
            assert await ask(node, second, 20) == (emulated_tokens(second, 20), full_blocks(200, 80))

    asyncio.run(scenario())
