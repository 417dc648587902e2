"""How growth is judged; and every path of the benchmark, at sizes of next to nothing."""

import asyncio

import pytest

from benchmarks.growth import gateway_paths, node_paths, tier_paths
from benchmarks.growth.paths import GrowthCost, GrowthSize, Paths, cost_of, rows_of


def costs_of(growth: dict[GrowthSize, float], pause_s: float = 0.0) -> dict[GrowthSize, GrowthCost]:
    return {size: GrowthCost(cpu_s, pause_s, 0) for size, cpu_s in growth.items()}


def test_growth_is_that_of_one_number_while_the_others_stay() -> None:
    growth = {GrowthSize(1, 100, 1): 0.01, GrowthSize(16, 100, 1): 0.01, GrowthSize(16, 400, 1): 0.04}
    small, _, large = rows_of("path", costs_of(growth))
    assert small["exponent"] == large["exponent"] == {"layers": 0.0, "blocks": pytest.approx(1.0), "nodes": None}
    assert (small["layers"], small["blocks"], large["cpu_s"], large["flags"]) == (1, 100, 0.04, [])


def test_growth_with_layers_and_blocks_is_flagged_and_so_is_a_pause() -> None:
    growth = {GrowthSize(1, 100, 1): 0.001, GrowthSize(16, 100, 1): 0.016, GrowthSize(16, 400, 1): 0.064}
    assert {tuple(row["flags"]) for row in rows_of("path", costs_of(growth))} == {("layers x blocks",)}
    assert {tuple(row["flags"]) for row in rows_of("path", costs_of(growth, 0.02))} == {("layers x blocks", "pause")}


def test_growth_of_next_to_nothing_is_noise() -> None:
    growth = {GrowthSize(1, 100, 1): 1e-6, GrowthSize(16, 100, 1): 16e-6, GrowthSize(16, 400, 1): 64e-6}
    assert {tuple(row["flags"]) for row in rows_of("path", costs_of(growth))} == {()}


@pytest.mark.parametrize("paths", [node_paths.paths, tier_paths.paths, gateway_paths.paths])
def test_every_path_runs(paths: Paths) -> None:
    async def scenario() -> list[GrowthCost]:
        return [await cost_of(act) async for _, act in paths(GrowthSize(2, 64, 4))]

    costs = asyncio.run(scenario())
    assert costs
    assert all(cost.cpu_s > 0 for cost in costs)
