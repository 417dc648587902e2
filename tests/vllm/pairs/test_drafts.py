"""Speculative decoding on both sides: a draft's KVCache is handed over as well, and answers are those of one server with drafts,
and of one without.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.cases import CASES, LLAMA, Case
from tests.vllm.harness import ANSWER_S, Answer, Engine, Pair, make_pair, telling_prompt
from tests.vllm.pairs.drafts import drafts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 16
LENGTHS = (2, 130, 257, 700, 1500)
CHUNK = 500  # about what is computed at once: drafts take some room
_seeds = count(70_000)


@dataclass(frozen=True)
class Drafting:
    """How a target has its tokens proposed. `layers`: in the name of each layer of the draft, empty where it has none."""

    method: str
    case: Case
    layers: str = ""
    looks_ahead: bool = False  # what it keeps of a token follows from the token after it

    def __str__(self) -> str:
        return self.method


def of(arch: str) -> Case:
    return next(case for case in CASES if case.arch == arch)


DRAFTING = (
    Drafting("ngram", LLAMA),
    Drafting("draft_model", LLAMA, "draft_model."),
    Drafting("eagle", LLAMA, "layers.4.", looks_ahead=True),
    Drafting("eagle3", LLAMA, "layers.4.", looks_ahead=True),
    Drafting("mtp", of("deepseek_v3"), "layers.4.", looks_ahead=True),
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=pytest.mark.dimensions(start=f"drafts {each}", drafting=None)) for each in DRAFTING
    ],
    ids=str,
)
def drafting(request: pytest.FixtureRequest) -> Drafting:
    return request.param


@pytest.fixture(scope="module")
def case(drafting: Drafting) -> Case:
    return drafting.case


@dataclass(frozen=True)
class World:
    """Two nodes with a draft, and a server with the same one alone."""

    pair: Pair
    alone: Engine


@pytest.fixture(scope="module")
def world(
    drafting: Drafting, case: Case, reference: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    path, speculation = drafts(drafting.method, case.arch, models)
    options = case.options(path) | {"speculative_config": speculation}
    if (
        drafting.method == "mtp"
    ):  # the CPU build cuts no prompt of latent attention; with drafts a step must be told to have room
        options["max_num_batched_tokens"] = options["max_model_len"]
    folder = tmp_path_factory.mktemp("drafts")
    with ExitStack() as started:
        alone = Engine("alone", folder, dict(options), "", None)
        started.callback(alone.close)
        pair = make_pair(folder, options)
        started.callback(pair.close)
        alone.wait_ready()
        reference.wait_ready()
        yield World(pair, alone)


def asked(engine: Engine, prompt: list[int], layers: str) -> "tuple[Answer, Future[dict[str, Any]]]":
    name = f"x{next(_seeds)}"
    kept = engine.inspect(name, layers)
    return engine.submit(name, prompt, TOKENS).result(ANSWER_S), kept


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_tokens_and_drafts_are_those_of_one_server(
    drafting: Drafting, world: World, reference: Engine, num_tokens: int
) -> None:
    prompt, layers, pair = telling_prompt(reference, num_tokens, _seeds), drafting.layers or "none", world.pair
    landed = pair.consumer.engine.inspect(pair.next_name("d"), layers)
    leg, decode = pair.hand_over(prompt, TOKENS)
    params, decoded = leg.result(ANSWER_S).params, decode.result(ANSWER_S)
    assert params is not None
    assert params["delivered"], params
    assert decoded.cached_tokens == num_tokens - 1
    alone, kept = asked(world.alone, prompt, layers)
    assert decoded.tokens == alone.tokens
    assert decoded.tokens == reference.submit(f"x{next(_seeds)}", prompt, TOKENS).result(ANSWER_S).tokens
    assert_same_proposals(drafting, decoded, alone, num_tokens)
    assert_same_cache(drafting, landed.result(ANSWER_S), kept.result(ANSWER_S), pair.layout.block_size, num_tokens)
    pair.assert_idle()


def assert_same_proposals(drafting: Drafting, decoded: Answer, alone: Answer, num_tokens: int) -> None:
    """A server alone has proposed something after each part of the prompt, too, and not used it. A step's first proposal follows
    from the cache, the others from the ones before as well.
    """
    proposals = list(zip(decoded.drafts, alone.drafts[-len(decoded.drafts) :], strict=True))
    assert proposals
    if not drafting.looks_ahead:
        assert all(ours == theirs for ours, theirs in proposals), proposals
    elif num_tokens > 2:  # else what one entry says counts for as much as all others
        others = [(ours, theirs) for ours, theirs in proposals if ours[:1] != theirs[:1]]
        assert 2 * len(others) < len(proposals), others


def assert_same_cache(
    drafting: Drafting, landed: dict[str, Any], kept: dict[str, Any], block: int, num_tokens: int
) -> None:
    """But for the ends of what was computed at once: vLLM has a draft look ahead to its prompt's last token there, whatever
    comes next. A server alone stops at other places than a leg, whose prompt ends one token earlier.
    """
    assert landed.keys() == kept.keys()
    assert bool(landed) == bool(drafting.layers), "these are the layers of the draft"
    whole = (num_tokens - 2) // block
    ends = len(range(0, num_tokens, CHUNK)) + 2 if drafting.looks_ahead else 0
    for layer, theirs in kept.items():
        other = ~np.isclose(landed[layer][:whole], theirs[:whole], rtol=1e-3, atol=1e-3)
        entry = theirs[0].size // block
        assert other.sum() <= ends * entry, f"{layer}: {other.sum()} of {other.size} numbers"
