"""What parts B to D make of answers. The parts themselves: `python -m tests.gpu --device cpu --parts B,C,D`, with vLLM."""

import pytest

from engine.torch import tiny
from tests.gpu.models import GEOMETRIES
from tests.gpu.servers import CPU, TimedAnswer, compared, document, missed, why_not

SLOW, QUICK = TimedAnswer([1, 2, 3], [2.0, 3.0, 4.0]), TimedAnswer([1, 2, 3], [1.0, 1.5, 2.0])


def test_times_are_compared_with_those_of_a_plain_server() -> None:
    row = compared([SLOW], [QUICK])
    assert (row["prefill"], row["itl_p50"], row["itl_p99"]) == (0.5, 2.0, 2.0)


def test_what_keeps_its_limits_has_missed_none() -> None:
    row = {"tokens": 9, "prefill": 0.97, "itl_p50": 1.03, "itl_p99": 1.1, "overlap": 0.9}
    assert missed(row, is_longest=True) == []


@pytest.mark.parametrize("change", [{"prefill": 0.96}, {"itl_p50": 1.04}, {"itl_p99": 1.2}, {"overlap": 0.5}])
def test_a_limit_that_is_missed_is_named(change: dict[str, float]) -> None:
    row = {"tokens": 9, "prefill": 1.0, "itl_p50": 1.0, "itl_p99": 1.0, "overlap": 1.0} | change
    (name,) = change
    assert name in missed(row, is_longest=True)[0]
    assert bool(missed(row, is_longest=False)) is (name != "overlap")


def test_an_answer_in_one_piece_says_nothing_of_intervals() -> None:
    row = {"tokens": 9, "overlap": 1.0} | compared([TimedAnswer([1, 2], [1.0])], [QUICK])
    assert any("itl_p50 is not known" in why for why in missed(row, is_longest=True))


def test_a_device_that_is_not_there_is_a_reason(tmp_path) -> None:
    assert why_not("cuda")
    assert document(tmp_path, CPU)["node"]["chunk_tokens"] == CPU.chunk_tokens


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_a_geometry_is_one_of_a_model(name: str) -> None:
    recipe = GEOMETRIES[name]
    kinds = {"model_type": str}
    assert all(isinstance(recipe[key], kind) for key, kind in kinds.items())
    for layers in ("layer_types", "layers_block_type"):
        if layers in recipe and "num_hidden_layers" in recipe:
            assert len(recipe[layers]) == recipe["num_hidden_layers"]
    assert name not in tiny.RECIPES, "it is written under a name of its own"
