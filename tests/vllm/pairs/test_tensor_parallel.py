"""Tensor parallelism with real ranks: vLLM engines with a worker process each for one or two ranks, on either side."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests.vllm.cases import CASES, LLAMA, Case, build
from tests.vllm.harness import ANSWER_S, Engine, Node, Pair, make_node, prompt_of, telling_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="ranks")]

LFM2 = next(case for case in CASES if case.arch == "lfm2")
TOKENS = 16
PATIENCE_S = 120.0  # ranks wait for each other at every layer, which takes long where cores are shared
_seeds = count(20_000)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def nodes(
    case: Case, reference: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Node]]:
    """Any of them can be either side. The digit is the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    options = case.options(build(case.arch, models))
    with ExitStack() as started:
        nodes = {}
        for name in ("1", "2", "2b"):
            ranked = options | {"tensor_parallel_size": int(name[0])}
            nodes[name] = make_node(f"node{name}", folder, ranked, "kv_both", "decode", lease_s=PATIENCE_S)
            started.callback(nodes[name].close)
        reference.wait_ready()
        yield nodes


def assert_hands_over(pair: Pair, reference: Engine) -> None:
    for num_tokens in (2, 130, 257, 700, 1500):
        prompt = telling_prompt(reference, num_tokens, _seeds)
        leg, decode = pair.hand_over(prompt, TOKENS)
        params, decoded = leg.result(ANSWER_S).params, decode.result(ANSWER_S)
        expected = reference.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S).tokens
        assert params is not None
        assert params["delivered"], params
        assert decoded.cached_tokens == num_tokens - 1, "computed again what had been sent"
        assert decoded.tokens == expected
    pair.assert_idle()


def of(case: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case], ids=str, indirect=True, scope="module")


@of(LLAMA)
@pytest.mark.parametrize(("producer", "consumer"), [("2", "1"), ("1", "2"), ("2", "2b")])
def test_heads_find_their_ranks(nodes: dict[str, Node], reference: Engine, producer: str, consumer: str) -> None:
    assert_hands_over(Pair(nodes[producer], nodes[consumer], PATIENCE_S), reference)


@of(LFM2)
def test_states_find_their_ranks(nodes: dict[str, Node], reference: Engine) -> None:
    assert_hands_over(Pair(nodes["2"], nodes["2b"], PATIENCE_S), reference)


@of(LFM2)
@pytest.mark.parametrize(("producer", "consumer"), [("2", "1"), ("1", "2")])
def test_states_cut_for_other_ranks_are_refused(nodes: dict[str, Node], producer: str, consumer: str) -> None:
    pair = Pair(nodes[producer], nodes[consumer], PATIENCE_S)
    prompt = prompt_of(1500, next(_seeds))
    ticket = pair.reserve(prompt)
    answer = pair.producer.engine.submit(pair.name(), prompt, 1, pair.leg_params(ticket)).result(ANSWER_S)
    assert answer.params == {"delivered": False, "reason": "layout_mismatch"}
    pair.consumer.agent.abort(ticket.transfer_id)
    pair.assert_idle()
