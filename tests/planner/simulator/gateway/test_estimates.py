"""What a simulated decider learns is what a gateway's learns."""

from typing import cast

from planner.decisions.estimates.durations import MoveEstimate
from planner.decisions.routing.policy import PlacementPolicy
from planner.simulator.gateway.estimates import Experience, LearnedTimes


def test_moves_that_are_late_make_a_simulated_decider_as_careful_as_a_gateway():
    rate, moves = 1e9, MoveEstimate(1e9)
    experience = Experience(PlacementPolicy(fetch_bytes_per_s=rate), cast(LearnedTimes, None))
    for _ in range(8):
        moves.observe(rate, 4.0)
        experience.on_moved(0.0, (rate, 4.0))
    assert experience.placement == PlacementPolicy(
        fetch_bytes_per_s=moves.bytes_per_s, fetch_calls_s=moves.calls_s, fetch_lateness=moves.lateness
    )
    assert experience.placement.ratio > 1
