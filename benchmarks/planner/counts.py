"""Work of a simulation in counts, which no busy machine changes: `python -m benchmarks.planner [--json]`.

events    of the simulation, a request
calls     of functions in Python, a request: what the time goes by

Each has a bar. The command ends with 1 where a count is above its bar: the simulator has become slower.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import numpy as np

from benchmarks.planner.speed import CONFIG, cached_scenario, conversations
from planner.model.site import load_site
from planner.model.workload import Trace, poisson
from planner.simulator.scenario import Scenario
from planner.simulator.trials.trial import Trial, TrialSetting, scenario_of
from planner.simulator.world import World

REQUESTS: Final = 3_000
# About a tenth above what was counted with Python 3.11; later versions call less.
BARS: Final = {
    "uncached": {"events": 3.9, "calls": 145.0},
    "cached": {"events": 5.0, "calls": 280.0},
}


class Calls:
    """Functions in Python that have been called."""

    count = 0

    def hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.count += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self.hook)
        try:
            yield
        finally:
            sys.setprofile(None)


def uncached(requests: int = REQUESTS) -> tuple[Scenario, Trace]:
    """The case study's plan at 80 % of its rate."""
    site = load_site(CONFIG)
    trace = poisson(site.workload.lengths, 1024, 0.8 * 3.24, requests, np.random.default_rng(0))
    return scenario_of(site, TrialSetting(19_400, 0.0, 3, 5), Trial()), trace


def cached(requests: int = REQUESTS) -> tuple[Scenario, Trace]:
    """Conversations on eight nodes of each role, with caches."""
    return cached_scenario(), conversations(requests, 8.0)


def counts_of(scenario: Scenario, trace: Trace) -> dict[str, float]:
    """What one run takes, a request."""
    world, calls, size = World(scenario, trace), Calls(), len(trace)
    with calls.counted():
        events = world.run().events
    return {"events": events / size, "calls": calls.count / size}


def counted() -> dict[str, dict[str, float]]:
    return {"uncached": counts_of(*uncached()), "cached": counts_of(*cached())}


def above(found: dict[str, dict[str, float]]) -> list[str]:
    """What is above its bar."""
    return [f"{run} {name}" for run, bars in BARS.items() for name, bar in bars.items() if found[run][name] > bar]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--json", action="store_true")
    args = arguments.parse_args()
    found = counted()
    if args.json:
        print(json.dumps({"counts": found, "bars": BARS}, indent=2))
    else:
        for run, counts in found.items():
            print(f"{run:9} " + "  ".join(f"{name} {value:.1f}" for name, value in counts.items()))
    if slower := above(found):
        sys.exit(f"above its bar: {', '.join(slower)}")
