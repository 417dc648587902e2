"""Speculative decoding on both sides: the draft's KVCache is handed over as well, and answers are those without drafts."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.vllm.cases import LLAMA, Case, build
from tests.vllm.harness import ANSWER_S, Engine, Pair, make_pair, telling_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="drafts")]

TOKENS = 16
_seeds = count(70_000)


@pytest.fixture(scope="module", params=[LLAMA], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def drafting(case: Case, reference: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes whose draft is the model itself: each draft is right, if what it stands on is."""
    path = build(case.arch, models)
    drafts = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    pair = make_pair(tmp_path_factory.mktemp("drafts"), case.options(path) | {"speculative_config": drafts})
    try:
        reference.wait_ready()
        yield pair
    finally:
        pair.close()


@pytest.mark.parametrize("num_tokens", [2, 130, 257, 700, 1500])
def test_tokens_are_those_without_drafts(drafting: Pair, reference: Engine, num_tokens: int) -> None:
    prompt = telling_prompt(reference, num_tokens, _seeds)
    leg, decode = drafting.hand_over(prompt, TOKENS)
    params, decoded = leg.result(ANSWER_S).params, decode.result(ANSWER_S)
    assert params is not None
    assert params["delivered"], params
    assert decoded.cached_tokens == num_tokens - 1
    assert decoded.tokens == reference.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S).tokens
    drafting.assert_idle()
