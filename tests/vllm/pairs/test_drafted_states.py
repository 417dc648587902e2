"""Drafts over recurrent states: what a prompt leaves is handed over to a node with other drafts, or from one. Answers are those
of a server that has neither a connector nor drafts.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.cases import CASES, Case
from tests.vllm.harness import ANSWER_S, Engine, Pair, make_node, telling_prompt
from tests.vllm.pairs.drafts import drafts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 40  # tiny models say the same again before long, which drafts guess
_seeds = count(90_000)


@dataclass(frozen=True)
class Drafted:
    """A target, and how many drafts its two nodes have: 0 of one that has none."""

    arch: str
    prefix_caching: bool
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.arch} {self.prefill} to {self.decode}{' in blocks' if self.prefix_caching else ''}"

    @property
    def case(self) -> Case:
        """In float32: in bfloat16 a token depends on what is verified beside it."""
        case = next(case for case in CASES if case.arch == self.arch)
        return replace(case, prefix_caching=self.prefix_caching, dtype="float32")


DRAFTED = (
    Drafted("lfm2", prefix_caching=False, prefill=0, decode=3),
    Drafted("lfm2", prefix_caching=True, prefill=2, decode=3),
    Drafted("granite_hybrid", prefix_caching=False, prefill=0, decode=3),
    Drafted("granite_hybrid", prefix_caching=True, prefill=3, decode=2),
    Drafted("nemotron_h", prefix_caching=True, prefill=0, decode=3),
    Drafted("qwen3_next", prefix_caching=False, prefill=3, decode=0),
    Drafted("qwen3_next", prefix_caching=True, prefill=0, decode=3),
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.dimensions(start=f"drafted {each}", drafted=None)) for each in DRAFTED
    ],
    ids=str,
)
def drafted(request: pytest.FixtureRequest) -> Drafted:
    return request.param


@dataclass(frozen=True)
class World:
    """Two nodes, and a server alone."""

    pair: Pair
    alone: Engine


@pytest.fixture(scope="module")
def world(drafted: Drafted, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path, speculation = drafts("ngram", drafted.arch, models)
    options = drafted.case.options(path)
    if drafted.arch == "qwen3_next":
        options["in_float32"] = True
    folder = tmp_path_factory.mktemp("drafted")
    with ExitStack() as started:
        alone = Engine("alone", folder, dict(options), "", None)
        started.callback(alone.close)
        nodes = []
        for name, role, drafts_of in (("east", "prefill", drafted.prefill), ("west", "decode", drafted.decode)):
            with_drafts: dict[str, Any] = {"speculative_config": speculation | {"num_speculative_tokens": drafts_of}}
            node = make_node(name, folder, options | (with_drafts if drafts_of else {}), "kv_both", role)
            started.callback(node.close)
            nodes.append(node)
        alone.wait_ready()
        yield World(Pair(*nodes), alone)


def test_answers_are_those_of_a_server_without_drafts(drafted: Drafted, world: World) -> None:
    """Lengths around a block's border, one after the other: blocks are used again, with what lay in them."""
    pair, block = world.pair, world.pair.layout.block_size
    accepted = 0
    for num_tokens in (2, 5, block - 1, block, block + 1, block + 2, 2 * block + 1, 1100):
        prompt = telling_prompt(world.alone, num_tokens, _seeds)
        leg, decode = pair.hand_over(prompt, TOKENS)
        params, decoded = leg.result(ANSWER_S).params, decode.result(ANSWER_S)
        assert params is not None
        assert params["delivered"], params
        assert decoded.cached_tokens == num_tokens - 1, "computed again what had been sent"
        expected = world.alone.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S)
        assert decoded.tokens == expected.tokens, num_tokens
        accepted += max(0, TOKENS - len(decoded.drafts)) if drafted.decode else 1
    assert accepted, "drafts were guessed"
    pair.assert_idle()


def test_several_at_once_and_beginnings_that_are_cached(drafted: Drafted, world: World) -> None:
    pair, block = world.pair, world.pair.layout.block_size
    shared = telling_prompt(world.alone, 2 * block, _seeds)
    prompts = [telling_prompt(world.alone, 1 + 97 * number, _seeds, shared) for number in range(4)]
    for _ in range(2):
        pending = [pair.hand_over(prompt, TOKENS) for prompt in prompts]
        for prompt, (leg, decode) in zip(prompts, pending, strict=True):
            assert leg.result(ANSWER_S).params["delivered"]
            expected = world.alone.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S)
            assert decode.result(ANSWER_S).tokens == expected.tokens
    pair.assert_idle()


def test_a_prompt_that_a_node_has_saved_itself_is_taken_up_again(drafted: Drafted, world: World) -> None:
    """In both roles: what vLLM has forgotten comes out of the agent's pages."""
    pair, block = world.pair, world.pair.layout.block_size
    for node in (pair.producer, pair.consumer):
        prompt = telling_prompt(world.alone, 2 * block + 1, _seeds)
        expected = world.alone.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S)
        for _ in range(2):
            answer = node.engine.submit(pair.name(), prompt, TOKENS, pair.local_params).result(ANSWER_S)
            assert answer.tokens == expected.tokens
            node.engine.forget_prefixes()
    pair.assert_idle()


@pytest.mark.parametrize("forgotten", [False, True], ids=["in vllm", "in pages"])
def test_a_leg_that_computes_one_token_saves_the_state_before_its_drafts(world: World, forgotten: bool) -> None:
    """vLLM adds drafts to a token that is computed alone; with 2 or more of them its state is in another block now and then."""
    pair, block = world.pair, world.pair.layout.block_size
    shared = telling_prompt(world.alone, 2 * block, _seeds)
    pair.producer.engine.submit(pair.name(), [*shared, 7], 1, pair.local_params).result(ANSWER_S)
    if forgotten:
        pair.producer.engine.forget_prefixes()
    for _ in range(3):
        prompt = telling_prompt(world.alone, 2, _seeds, shared)
        leg, decode = pair.hand_over(prompt, TOKENS)
        assert leg.result(ANSWER_S).params["delivered"]
        expected = world.alone.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S)
        assert decode.result(ANSWER_S).tokens == expected.tokens
    pair.assert_idle()
