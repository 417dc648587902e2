"""Mamba 2 with prefix caching (`align`): a last chunk does not stop at the last border of blocks, but leaves its state behind.

The CPU build lacks the two kernels that do so; the connector has PyTorch compute them (`engine.vllm.cpu.cpu_build`). All else,
what vLLM's scheduler says of it and which block a state goes to, is vLLM's own. The reference caches nothing.
"""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.vllm.cases import CASES, Case, build
from tests.vllm.harness import ANSWER_S, Engine, Pair, make_pair, prompt_of, telling_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 16
MAMBA2 = tuple(case for case in CASES if case.arch in ("granite_hybrid", "falcon_h1", "nemotron_h"))
_seeds = count(90_000)


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.dimensions(start=f"borders {each}", case=None)) for each in MAMBA2],
    ids=str,
)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def aligned(case: Case, reference: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    caching = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}
    pair = make_pair(tmp_path_factory.mktemp("borders"), case.options(build(case.arch, models)) | caching)
    try:
        reference.wait_ready()
        yield pair
    finally:
        pair.close()


def expected(reference: Engine, prompt: list[int]) -> list[int]:
    return reference.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S).tokens


def test_tokens_are_those_of_one_server(aligned: Pair, reference: Engine) -> None:
    block = aligned.layout.block_size
    for num_tokens in (2, block, block + 1, block + 2, 2 * block + 1, 3 * block + block // 2):
        prompt = telling_prompt(reference, num_tokens, _seeds)
        leg, decode = aligned.hand_over(prompt, TOKENS)
        params, decoded = leg.result(ANSWER_S).params, decode.result(ANSWER_S)
        assert params is not None
        assert params["delivered"], params
        assert decoded.cached_tokens == num_tokens - 1, "computed again what had been sent"
        assert decoded.tokens == expected(reference, prompt)
    aligned.assert_idle()


@pytest.mark.parametrize("forgotten", [False, True], ids=["in vllm", "in pages"])
def test_the_state_at_a_prompts_last_border_is_kept(aligned: Pair, reference: Engine, forgotten: bool) -> None:
    """What comes after the border is computed in one step with what comes before, and in another prompt it is something else."""
    block, node = aligned.layout.block_size, aligned.producer
    beginning = prompt_of(block + block // 2, next(_seeds))
    node.engine.submit(aligned.name(), beginning, 1, aligned.local_params).result(ANSWER_S)
    aligned.assert_idle()
    if forgotten:
        node.engine.forget_prefixes()
    prompt = telling_prompt(reference, block // 2, _seeds, beginning[: block + 3])
    answer = node.engine.submit(aligned.name(), prompt, TOKENS, aligned.local_params).result(ANSWER_S)
    assert answer.cached_tokens == block
    assert answer.tokens == expected(reference, prompt)
    aligned.assert_idle()
