"""Do simulations still find the same, to the byte? `python -m benchmarks.planner.equality FILE… [--save OUT | --as OUT]`.

Each file of requests is simulated in four ways, 32 runs of eight files: by the paper's assumptions, as deployments do, with
small caches and moves between clusters, and with a link that fails while a controller changes roles. A run's line has a digest
of its report and of what each request saw. `--save` keeps the lines; `--as` compares with kept ones, and ends with 1 where any
differs. So what makes the simulator faster is shown to change nothing.
"""

import argparse
import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.planner.agreement import CONFIG, requests_of
from planner.decisions.admission.overload import AdmissionPolicy
from planner.model.site import load_site
from planner.simulator.outcome import SimulationOutcome
from planner.simulator.policies import Estimates
from planner.simulator.scenario import Outage
from planner.simulator.trials.trial import DEPLOYED_TRIAL, Trial, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.control.controller import ControllerConfig

RATE: Final = 2.0  # requests per s
SETTING: Final = TrialSetting(8_000, 0.25, 4, 4)
WAYS: Final = MappingProxyType[str, Trial](
    {
        "ideal": Trial(),
        "deployed": DEPLOYED_TRIAL,
        "small caches": replace(
            DEPLOYED_TRIAL, cache_gb=300.0, cross_cluster_cache=True, admission=AdmissionPolicy.PREDICTION, ttft_s=8.0
        ),
        "failing link": Trial(
            cache_gb=150.0, fetch_gbps=25.0, tail_share=0.1, increment_tokens=512, estimates=Estimates.EXACT,
            outages=[Outage(from_s=100.0, until_s=160.0), Outage(from_s=300.0, until_s=400.0, share=0.2)],
            controller=ControllerConfig(tick_s=30.0, warmup_s=60.0, min_requests=50, cooldown_s=60.0),
        ),
    }
)  # fmt: skip


def digest(outcome: SimulationOutcome) -> str:
    """Of all that a run has found but for its number of events."""
    found = hashlib.sha256(json.dumps(outcome.report()).encode())
    for name in ("ttft_s", "tbt_s", "e2e_s", "prefill_wait_s", "cached_tokens", "remote"):
        found.update(getattr(outcome, name).tobytes())
    for sent in outcome.egress_bytes.values():
        found.update(sent.tobytes())
    return found.hexdigest()[:16]


def lines_of(path: Path, count: int) -> list[str]:
    """A line for each way to simulate the first requests of a file."""
    trace = requests_of(path, count, 1).at(RATE, 0)
    site = load_site(CONFIG)
    return [
        f"{trace.name} {len(trace)} {way}: {digest(simulate(scenario_of(site, SETTING, trial), trace))}"
        for way, trial in WAYS.items()
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("files", type=Path, nargs="+", metavar="FILE", help="traces, or sessions of agents")
    arguments.add_argument("--requests", type=int, default=1_500, help="of each file (default: %(default)s)")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--save", type=Path, metavar="OUT", help="keep the lines")
    arguments.add_argument("--as", type=Path, metavar="OUT", dest="kept", help="compare with lines that were kept")
    args = arguments.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        lines = [line for found in pool.map(partial(lines_of, count=args.requests), args.files) for line in found]
    print("\n".join(lines))
    if args.save is not None:
        args.save.write_text("\n".join(lines) + "\n")
    if args.kept is not None and (others := set(lines) ^ set(args.kept.read_text().splitlines())):
        sys.exit("differs:\n" + "\n".join(sorted(others)))


if __name__ == "__main__":
    main()
