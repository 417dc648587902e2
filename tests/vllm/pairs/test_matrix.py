"""Tokens through two nodes equal those of vLLM alone: models × lengths × prefix hits × requests in flight."""

from itertools import count

import pytest

from tests.vllm.cases import Case
from tests.vllm.harness import ANSWER_S, Answer, Engine, Pair, prompt_of, telling_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 16
_seeds = count(1)


def assert_delivered(leg: Answer, prompt: list[int]) -> None:
    assert leg.params is not None
    assert leg.params["delivered"], leg.params
    assert leg.params["num_tokens"] == len(prompt) - 1


def assert_same(decoded: Answer, prompt: list[int], reference: Engine) -> None:
    assert len(decoded.tokens) == TOKENS
    expected = reference.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S)
    assert decoded.tokens == expected.tokens


def hand_over(pair: Pair, prompt: list[int]) -> tuple[Answer, Answer]:
    leg, decode = pair.hand_over(prompt, TOKENS)
    return leg.result(ANSWER_S), decode.result(ANSWER_S)


def lengths(block: int) -> list[int]:
    """Prompts that end around a block's boundary: a leg computes one token less than its prompt has."""
    return [2, block // 2, block, block + 1, block + 2, 2 * block + 1, 1500]


def test_every_length(pair: Pair, reference: Engine, case: Case) -> None:
    for num_tokens in lengths(pair.layout.block_size):
        prompt = telling_prompt(reference, num_tokens, _seeds)
        leg, decoded = hand_over(pair, prompt)
        assert_delivered(leg, prompt)
        assert decoded.cached_tokens == num_tokens - 1, "computed again what had been sent"
        assert_same(decoded, prompt, reference)
    pair.assert_idle()


@pytest.mark.parametrize("primed", ["producer", "consumer", "both"])
@pytest.mark.parametrize("forgotten", [False, True], ids=["in vllm", "in pages"])
def test_prefix_hits(pair: Pair, reference: Engine, case: Case, primed: str, forgotten: bool) -> None:
    block = pair.layout.block_size
    seed = next(_seeds)
    shared = prompt_of(2 * block + 7, seed)
    nodes = {"producer": [pair.producer], "consumer": [pair.consumer]}.get(primed, [pair.producer, pair.consumer])
    for node in nodes:
        node.engine.submit(pair.name(), shared, 1, pair.local_params).result(ANSWER_S)
        if forgotten:
            node.engine.forget_prefixes()
    prompt = telling_prompt(reference, block + 5, _seeds, shared)
    leg, decoded = hand_over(pair, prompt)
    assert_delivered(leg, prompt)
    assert_same(decoded, prompt, reference)
    pair.assert_idle()


def test_six_in_flight(pair: Pair, reference: Engine, case: Case) -> None:
    prompts = [telling_prompt(reference, 150 + 130 * number, _seeds) for number in range(6)]
    pending = [pair.hand_over(prompt, TOKENS) for prompt in prompts]
    for prompt, (leg, decode) in zip(prompts, pending, strict=True):
        assert_delivered(leg.result(ANSWER_S), prompt)
        decoded = decode.result(ANSWER_S)
        # Rounded to bfloat16, values depend on what else is in a batch.
        if case.dtype == "float32":
            assert_same(decoded, prompt, reference)
    pair.assert_idle()


def test_a_prompt_sent_twice_is_computed_once(pair: Pair, reference: Engine, case: Case) -> None:
    prompt = telling_prompt(reference, 2 * pair.layout.block_size + 1, _seeds)
    for _ in range(2):
        leg, decoded = hand_over(pair, prompt)
        assert_delivered(leg, prompt)
        assert_same(decoded, prompt, reference)
    pair.assert_idle()
