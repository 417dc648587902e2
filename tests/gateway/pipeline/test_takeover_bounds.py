"""How often a stream is carried on, and how far each takeover has to bring it."""

import pytest

from tests.gateway.memory.pipeline import on_memory_loop
from tests.gateway.pipeline.test_takeovers import forgiving, streamed, streams_broken, takeovers, texts
from tests.gateway.worlds import Deployment


def legs(w: Deployment) -> tuple[int, int]:
    """How many prefills and decodes have been asked for."""
    prefills = sum(len(node.bodies) for node in w.nodes.remote + w.nodes.local)
    return prefills, sum(len(node.bodies) for node in w.nodes.decode)


def long_and_resumable(w: Deployment, faults: list[str]) -> tuple[str, ...]:
    words = tuple(f" w{number}" for number in range(120))
    for node in w.nodes.decode:
        node.script.words, node.script.is_resumable, node.script.decode = words, True, faults
    return words


@pytest.mark.parametrize("fault", ["error", "half"])
@on_memory_loop
async def test_engines_that_fail_after_every_token_are_tries_of_one_request(fault: str) -> None:
    async with forgiving(decode=4, max_attempts=3) as w:
        long_and_resumable(w, [f"{fault}_after {number}" for number in range(1, 120)])
        assert texts(await streamed(w)) == [" w0", " w1", " w2"]
        assert legs(w) == (3, 3)
        assert await takeovers(w) == {"continued": 2, "attempts_exhausted": 1}
        assert sum((await streams_broken(w)).values()) == 1
        await w.settled()


@on_memory_loop
async def test_an_engine_that_adds_enough_has_paid_for_its_takeover() -> None:
    async with forgiving(max_attempts=2, retry_share=0.0, least_retries=0) as w:
        words = long_and_resumable(w, [f"half_after {number}" for number in range(16, 120, 16)])
        assert texts(await streamed(w)) == list(words)
        assert await takeovers(w) == {"continued": 7}


@on_memory_loop
async def test_a_stream_is_carried_on_so_often_and_no_more() -> None:
    async with forgiving(max_takeovers=2) as w:
        words = long_and_resumable(w, [f"half_after {number}" for number in (20, 40, 60)])
        assert texts(await streamed(w)) == list(words[:60])
        assert await takeovers(w) == {"continued": 2, "takeovers_spent": 1}


@on_memory_loop
async def test_a_takeover_that_adds_little_is_paid_for_out_of_the_budget() -> None:
    async with forgiving(decode=4, max_attempts=4, retry_share=0.0, least_retries=0) as w:
        words = long_and_resumable(w, ["half_after 40", "half_after 42", "half_after 90"])
        assert texts(await streamed(w)) == list(words[:42])  # the first failure of a stream is never refused
        assert await takeovers(w) == {"continued": 1, "retry_budget_spent": 1}
        assert 'prfaas_retries_refused_total{stage="stream"} 1.0' in await w.metrics()
