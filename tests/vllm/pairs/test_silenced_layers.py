"""Layers whose attention op lacks the connector's hook, as some have on a GPU: here one layer of a real engine is silenced."""

from itertools import count

import pytest

from tests.vllm.cases import LLAMA, Case
from tests.vllm.harness import ANSWER_S, Engine, Pair, telling_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="silenced layers")]

TOKENS = 16
_seeds = count(90_000)


@pytest.fixture(scope="module", params=[LLAMA], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def assert_as_alone(reference: Engine, prompt: list[int], tokens: list[int]) -> None:
    assert tokens == reference.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S).tokens


def assert_kept_as_alone(pair: Pair, reference: Engine, prompt: list[int]) -> None:
    """From the agent's pages, whatever of the prompt those have."""
    pair.producer.engine.forget_prefixes()
    answer = pair.producer.engine.submit(pair.name(), prompt, TOKENS, pair.local_params).result(ANSWER_S)
    assert_as_alone(reference, prompt, answer.tokens)


@pytest.mark.parametrize("layer", [0, -1])
def test_a_layer_without_its_hook_is_handed_over_like_the_others(pair: Pair, reference: Engine, layer: int) -> None:
    prompt = telling_prompt(reference, 600, _seeds)
    with pair.producer.engine.silenced(layer):
        leg, decode = pair.hand_over(prompt, TOKENS)
        params = leg.result(ANSWER_S).params
        assert params is not None
        assert params["delivered"]
        assert_as_alone(reference, prompt, decode.result(ANSWER_S).tokens)
    assert_kept_as_alone(pair, reference, prompt)
    pair.assert_idle()


def test_kvcache_that_lacks_a_layer_is_neither_announced_nor_kept(pair: Pair, reference: Engine) -> None:
    prompt = telling_prompt(reference, 600, _seeds)
    with pair.producer.engine.silenced(0, never_saved=True):
        leg, decode = pair.hand_over(prompt, TOKENS)
        params = leg.result(ANSWER_S).params
        assert params is not None
        assert not params["delivered"], "a layer of it was never written"
        answer = decode.result(ANSWER_S)
        assert_as_alone(reference, prompt, answer.tokens)
        assert answer.params is not None
        assert answer.params["recomputed"]
    assert_kept_as_alone(pair, reference, prompt)
    pair.assert_idle()
