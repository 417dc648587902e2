"""Drafts over recurrent states: what a prompt leaves is handed over to a node with other drafts, or from one. Answers are those
of a server that has neither a connector nor drafts.
"""

from collections.abc import Iterator, Sequence
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
    method: str = "ngram"

    def __str__(self) -> str:
        names = [self.arch, *([self.method] if self.method != "ngram" else []), f"{self.prefill} to {self.decode}"]
        return " ".join([*names, *(["in blocks"] if self.prefix_caching else [])])

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
    Drafted("qwen3_next", prefix_caching=True, prefill=1, decode=3, method="mtp"),
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

    def question(self, num_tokens: int, beginning: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """A prompt and its answer. Nodes with drafts guess some of it rightly."""
        prompt = telling_prompt(self.alone, num_tokens, _seeds, beginning)
        expected = self.alone.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S).tokens
        for node in (self.pair.producer, self.pair.consumer):
            node.engine.foretell([*prompt, *expected])
        return prompt, expected


@pytest.fixture(scope="module")
def world(drafted: Drafted, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path, speculation = drafts(drafted.method, drafted.arch, models)
    options = drafted.case.options(path)
    if drafted.arch == "qwen3_next":
        options["in_float32"] = True
    folder = tmp_path_factory.mktemp("drafted")
    with ExitStack() as started:
        # Plain vLLM's scan of Mamba 2 on a CPU fails with prefix caching.
        alone = Engine("alone", folder, options | {"enable_prefix_caching": False}, "", None)
        started.callback(alone.close)
        nodes = []
        for name, role, drafts_of in (("east", "prefill", drafted.prefill), ("west", "decode", drafted.decode)):
            settings: dict[str, Any] = options | {"foretold": drafted.method == "ngram"}
            if drafts_of:
                settings["speculative_config"] = speculation | {"num_speculative_tokens": drafts_of}
            nodes.append(make_node(name, folder, settings, "kv_both", role))
            started.callback(nodes[-1].close)
        alone.wait_ready()
        yield World(Pair(*nodes), alone)


def test_answers_are_those_of_a_server_without_drafts(drafted: Drafted, world: World) -> None:
    """Lengths around a block's border, one after the other: blocks are used again, with what lay in them."""
    pair, block = world.pair, world.pair.layout.block_size
    accepted = 0
    for num_tokens in (2, 5, block - 1, block, block + 1, block + 2, 2 * block + 1, 1100):
        prompt, expected = world.question(num_tokens)
        leg, decode = pair.hand_over(prompt, TOKENS)
        params, decoded = leg.result(ANSWER_S).params, decode.result(ANSWER_S)
        assert params is not None
        assert params["delivered"], params
        assert decoded.cached_tokens == num_tokens - 1, "computed again what had been sent"
        assert decoded.tokens == expected, num_tokens
        accepted += TOKENS - len(decoded.drafts)
    assert not drafted.decode or drafted.method != "ngram" or accepted > 2 * TOKENS, "few drafts were right"
    pair.assert_idle()


def test_several_at_once_and_beginnings_that_are_cached(world: World) -> None:
    pair, block = world.pair, world.pair.layout.block_size
    shared = telling_prompt(world.alone, 2 * block, _seeds)
    questions = [world.question(1 + 97 * number, shared) for number in range(4)]
    for _ in range(2):
        pending = [pair.hand_over(prompt, TOKENS) for prompt, _ in questions]
        for (_, expected), (leg, decode) in zip(questions, pending, strict=True):
            params = leg.result(ANSWER_S).params
            assert params is not None
            assert params["delivered"], params
            assert decode.result(ANSWER_S).tokens == expected
    pair.assert_idle()


def test_a_prompt_that_a_node_has_saved_itself_is_taken_up_again(world: World) -> None:
    """In both roles: what vLLM has forgotten comes out of the agent's pages."""
    pair, block = world.pair, world.pair.layout.block_size
    for node in (pair.producer, pair.consumer):
        prompt, expected = world.question(2 * block + 1)
        for _ in range(2):
            answer = node.engine.submit(pair.name(), prompt, TOKENS, pair.local_params).result(ANSWER_S)
            assert answer.tokens == expected
            node.engine.forget_prefixes()
    pair.assert_idle()


def test_an_answer_that_crosses_borders_is_the_beginning_of_the_next_prompt(world: World) -> None:
    """What is kept of an answer was computed with drafts that were right, and with some that were not."""
    pair, block = world.pair, world.pair.layout.block_size
    for node in (pair.producer, pair.consumer):
        for before in (1, 2, 3, 20):
            prompt, expected = world.question(2 * block - before)
            first = node.engine.submit(pair.name(), prompt, TOKENS, pair.local_params).result(ANSWER_S)
            assert first.tokens == expected
            longer, goes_on = world.question(5, [*prompt, *expected])
            for forgotten in (False, True):
                if forgotten:
                    node.engine.forget_prefixes()
                second = node.engine.submit(pair.name(), longer, TOKENS, pair.local_params).result(ANSWER_S)
                assert second.tokens == goes_on, (before, forgotten)
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
        prompt, expected = world.question(2, shared)
        leg, decode = pair.hand_over(prompt, TOKENS)
        params = leg.result(ANSWER_S).params
        assert params is not None
        assert params["delivered"], params
        assert decode.result(ANSWER_S).tokens == expected
    pair.assert_idle()


def test_a_leg_of_one_token_beside_an_answer_hands_over_no_state_with_drafts_in_it(world: World) -> None:
    """vLLM pads it with drafts, and computes the first tokens of a prompt as one piece."""
    pair = world.pair
    busy, _ = world.question(20)
    for _ in range(3):
        prompt, expected = world.question(2)
        answer = pair.producer.engine.submit(pair.name(), busy, 10 * TOKENS, pair.local_params)
        leg, decode = pair.hand_over(prompt, TOKENS)
        assert decode.result(ANSWER_S).tokens == expected
        leg.result(ANSWER_S)
        answer.result(ANSWER_S)
    pair.assert_idle()
