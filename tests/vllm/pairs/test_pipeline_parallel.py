"""Pipeline parallelism with real stages: each has its own layers in a process of its own, and pushes those alone."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests.vllm.cases import CASES, LLAMA, Case, build
from tests.vllm.harness import ANSWER_S, Engine, Node, Pair, make_node, telling_prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.dimensions(start="stages")]

FALCON = next(case for case in CASES if case.arch == "falcon_h1")  # vLLM wants attention in every stage
TOKENS = 16
LENGTHS = (2, 130, 257, 700, 1500)
PATIENCE_S = 120.0  # stages wait for each other, which takes long where cores are shared
PLACES = {
    "one": {},
    "two stages": {"pipeline_parallel_size": 2},
    "three stages": {"pipeline_parallel_size": 3},  # of four layers: unequal ones
    "two ranks": {"tensor_parallel_size": 2},
}
_seeds = count(30_000)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def nodes(
    case: Case, reference: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Node]]:
    """Any of them can be either side."""
    folder = tmp_path_factory.mktemp("stages")
    options = case.options(build(case.arch, models))
    with ExitStack() as started:
        nodes = {}
        for name, places in PLACES.items():
            if case is not LLAMA and name not in ("one", "two stages"):  # states are cut for a number of ranks
                continue
            node_name = name.replace(" ", "-")
            nodes[name] = make_node(node_name, folder, options | places, "kv_both", "decode", lease_s=PATIENCE_S)
            started.callback(nodes[name].close)
        reference.wait_ready()
        yield nodes


def of(case: Case) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case], ids=str, indirect=True, scope="module")


def assert_hands_over(pair: Pair, reference: Engine) -> None:
    """All prompts at once: several batches, and several chunks of one prompt, are in the pipeline together."""
    prompts = [telling_prompt(reference, num_tokens, _seeds) for num_tokens in LENGTHS]
    expected = [reference.submit(f"x{next(_seeds)}", prompt, TOKENS) for prompt in prompts]
    legs = [pair.hand_over(prompt, TOKENS) for prompt in prompts]
    for prompt, (leg, decode), alone in zip(prompts, legs, expected, strict=True):
        params = leg.result(ANSWER_S).params
        assert params is not None
        assert params["delivered"], params
        decoded = decode.result(ANSWER_S)
        assert decoded.cached_tokens == len(prompt) - 1, "computed again what had been sent"
        assert decoded.tokens == alone.result(ANSWER_S).tokens
    pair.assert_idle()


@of(LLAMA)
@pytest.mark.parametrize(
    ("producer", "consumer"),
    [("two stages", "one"), ("one", "two stages"), ("two ranks", "two stages"), ("three stages", "two stages")],
)
def test_layers_find_their_stages(nodes: dict[str, Node], reference: Engine, producer: str, consumer: str) -> None:
    assert_hands_over(Pair(nodes[producer], nodes[consumer], PATIENCE_S), reference)


@of(LLAMA)
def test_chunks_of_one_prompt_are_in_the_pipeline_together(nodes: dict[str, Node], reference: Engine) -> None:
    pair = Pair(nodes["two stages"], nodes["one"], PATIENCE_S)
    prompt = telling_prompt(reference, 3000, _seeds)
    leg, decode = pair.hand_over(prompt, TOKENS)
    answer = leg.result(ANSWER_S)
    assert answer.overlaps
    assert answer.params is not None
    assert answer.params["bytes_before_prefill_end"] > answer.params["bytes_total"] / 2, (
        "layers leave with their chunks"
    )
    assert decode.result(ANSWER_S).tokens == reference.submit("long", prompt, TOKENS).result(ANSWER_S).tokens
    pair.assert_idle()


@of(FALCON)
@pytest.mark.parametrize(("producer", "consumer"), [("two stages", "one"), ("one", "two stages")])
def test_states_find_their_stages(nodes: dict[str, Node], reference: Engine, producer: str, consumer: str) -> None:
    assert_hands_over(Pair(nodes[producer], nodes[consumer], PATIENCE_S), reference)
