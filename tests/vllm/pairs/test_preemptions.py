"""Engines with blocks for a part of what is asked of them: requests lose theirs and come back, and the tokens are the same.

Every kind of hybrid, and a dense model. vLLM computes a preempted request from its beginning, or from what its cache has of it; a
recurrent state must not take a token twice for that, and what had landed or was to be sent is still right.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from tests.vllm.cases import CASES, Case, build
from tests.vllm.conftest import Fleet
from tests.vllm.harness import ANSWER_S, Answer, Engine, Pair, make_pair, prompt_of, telling_prompt, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="preemptions")]

REQUESTS, MAX_TOKENS = 6, 300
# In float32: what is computed again in other pieces has the same tokens. (vLLM's CPU kernel of gated delta nets wants bf16.)
ARCHITECTURES = ("llama", "lfm2", "granite_hybrid")
TIGHT = {"num_gpu_blocks_override": 24, "max_model_len": 2048}
EGRESS_BYTES_PER_S = 1e6  # so that legs have been computed for a while before they have been delivered
PATIENCE_S = 120.0
TRIES = 4
_seeds = count(70_000)


@pytest.fixture(scope="module", params=[case for case in CASES if case.arch in ARCHITECTURES], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def pair(case: Case, fleet: Fleet, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    fleet.close_pair()
    options = case.options(build(case.arch, models)) | TIGHT
    settings = {"lease_s": PATIENCE_S, "egress_bytes_per_s": EGRESS_BYTES_PER_S}
    tight = make_pair(tmp_path_factory.mktemp("tight"), options, **settings)
    tight.patience_s = PATIENCE_S
    yield tight
    tight.close()


@pytest.fixture(scope="module")
def reference(pair: Pair, case: Case, fleet: Fleet) -> Engine:
    """With room for all."""
    alone = fleet.reference(case)
    alone.wait_ready()
    return alone


def assert_as_alone(reference: Engine, answers: Sequence[tuple[list[int], Answer]]) -> None:
    alone = [reference.submit(f"x{next(_seeds)}", prompt, len(answer.tokens)) for prompt, answer in answers]
    for (_, answer), expected in zip(answers, alone, strict=True):
        assert answer.tokens == expected.result(ANSWER_S).tokens


def test_answers_that_lose_their_blocks_are_the_same(pair: Pair, reference: Engine) -> None:
    """All have landed before the first of them is asked for: over a thin link one had ended when the next one came."""
    prompts = [telling_prompt(reference, 300 + 40 * number, _seeds) for number in range(REQUESTS)]
    landing = [(pair.name(), pair.reserve(prompt)) for prompt in prompts]
    legs = [
        pair.producer.engine.submit(f"{name}-p", prompt, 1, pair.leg_params(ticket))
        for prompt, (name, ticket) in zip(prompts, landing, strict=True)
    ]
    assert all(leg.result(ANSWER_S).params["delivered"] for leg in legs)
    decodes = [
        pair.consumer.engine.submit(f"{name}-d", prompt, MAX_TOKENS, pair.landing_params(ticket))
        for prompt, (name, ticket) in zip(prompts, landing, strict=True)
    ]
    answers = [decode.result(ANSWER_S) for decode in decodes]
    assert sum(answer.preemptions for answer in answers), "there was room for all of them: this shows nothing"
    assert [len(answer.tokens) for answer in answers] == [MAX_TOKENS] * REQUESTS
    assert_as_alone(reference, list(zip(prompts, answers, strict=True)))
    pair.assert_idle()


def test_legs_that_lose_their_blocks_are_delivered_for_all_that(pair: Pair, reference: Engine) -> None:
    """Answers of the same engine need another block each while legs wait for the link, and came before them."""
    size = pair.layout.block_size
    for _ in range(TRIES):
        prompts = [telling_prompt(reference, 490, _seeds) for _ in range(5)]
        growing = [(prompt_of(size - 40, next(_seeds)), pair.name()) for _ in range(4)]
        grown = [pair.producer.engine.submit(f"{name}-g", prompt, 80, pair.local_params) for prompt, name in growing]
        until(
            lambda growing=growing: all(f"{name}-g" in pair.producer.engine.progress for _, name in growing), "they run"
        )
        pending = [pair.hand_over(prompt, 16) for prompt in prompts]
        legs = [leg.result(ANSWER_S) for leg, _ in pending]
        assert all(leg.params["delivered"] for leg in legs)
        answers = [*zip((prompt for prompt, _ in growing), (each.result(ANSWER_S) for each in grown), strict=True)]
        answers += zip(prompts, (decode.result(ANSWER_S) for _, decode in pending), strict=True)
        assert_as_alone(reference, answers)
        pair.assert_idle()
        if sum(leg.preemptions for leg in legs):
            return
    raise AssertionError(f"there was room for all of them, {TRIES} times: this shows nothing")
