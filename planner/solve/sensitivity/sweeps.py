"""What if: the same site solved over ranges of its numbers."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.errors import InputError
from planner.model.reading import GBPS, TOKENS, Range, named
from planner.model.site import INSTANCES, Deployment, Site
from planner.solve.problem import Problem, SolveOptions, best_cut, pose, threshold_for
from planner.solve.search import mixed, rates
from planner.solve.watch import ProgressWatch, unwatched
from transport.control.settings import require

FACTOR: Final = Range(0, 1e6)
KNOBS: Final[Mapping[str, Range]] = {
    "b_out": GBPS,
    "n_prfaas": INSTANCES,
    "n_pd": INSTANCES,
    "output_tokens": TOKENS,
    "t_prfaas": FACTOR,
    "t_pd": FACTOR,
    "decode_rate": FACTOR,
}
MAY_BE_0: Final = frozenset({"b_out", "n_prfaas", "n_pd"})
STEPS: Final = 11
COUNT: Final = Range(1, 10_000, is_whole=True)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Values of one knob: b_out (Gbit/s), n_prfaas, n_pd, output_tokens, or factors t_prfaas, t_pd (of times: more is
    slower) and decode_rate (more is faster).
    """

    knob: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Sweep":
        """`knob=low:high[:steps]` or `knob=a,b,c`. Raises InputError saying what would do."""
        knob, _, given = text.partition("=")
        if knob not in KNOBS:
            raise InputError(f"sweep {knob!r}: must be one of {', '.join(KNOBS)}")
        with named(f"sweep {text!r}"):
            parts = given.split(":")
            if len(parts) == 1:
                return cls(knob, tuple(_value(knob, value) for value in given.split(",")))
            require(len(parts) <= 3, "its form", text, f"{knob}=low:high[:steps] or {knob}=a,b,c")
            low, high = (_value(knob, value) for value in parts[:2])
            count = int(COUNT.of_text("steps", parts[2])) if len(parts) == 3 else STEPS
        values = np.linspace(low, high, count)
        if KNOBS[knob].is_whole:
            values = np.unique(np.round(values))
        return cls(knob, tuple(float(value) for value in values))


def _value(knob: str, text: str) -> float:
    allowed = KNOBS[knob]
    value = allowed.of_text(knob, text)
    return value if knob in MAY_BE_0 else allowed.above_low(knob, value)


def whatif(
    site: Site,
    options: SolveOptions,
    sweeps: Sequence[Sweep],
    watched: ProgressWatch = unwatched,
    variant: Deployment | None = None,
) -> list[dict[str, Any]]:
    """One row per combination: the knobs, and the plan that is best there, within what a deployment pins."""
    base = pose(site, options, variant)
    combinations = math.prod(len(sweep.values) for sweep in sweeps)
    if combinations > COUNT.high:
        raise InputError(f"sweeps: {combinations} combinations; at most {COUNT.high:g}")
    rows = []
    for values in watched(list(itertools.product(*(sweep.values for sweep in sweeps))), "what if"):
        setting = dict(zip((sweep.knob for sweep in sweeps), values, strict=True))
        capacity, loads = base.capacity, base.loads
        decode_s = capacity.decode_s / setting.get("decode_rate", 1.0)
        decode_s *= setting.get("output_tokens", site.workload.output_tokens) / site.workload.output_tokens
        problem = replace(
            base,
            loads=loads.scaled(remote=setting.get("t_prfaas", 1.0), local=setting.get("t_pd", 1.0)),
            capacity=replace(
                capacity,
                num_prfaas=int(setting.get("n_prfaas", capacity.num_prfaas)),
                num_pd=int(setting.get("n_pd", capacity.num_pd)),
                egress_bytes_per_s=setting.get("b_out", capacity.egress_bytes_per_s / BYTES_PER_S_PER_GBPS)
                * BYTES_PER_S_PER_GBPS,
                decode_s=decode_s,
            ),
        )
        _check_pins(problem)
        found = best_cut(problem, options)
        offloaded = mixed(problem.loads.offloaded, found.cut, found.share)
        egress = mixed(problem.loads.egress_bytes, found.cut, found.share) * found.rate / BYTES_PER_S_PER_GBPS
        rows.append(
            setting
            | {
                "lambda_max_req_per_s": found.rate,
                "threshold_tokens": threshold_for(problem, found, options),
                "tie_share": found.share,
                "num_prefill": found.num_prefill,
                "num_decode": found.num_decode,
                "offload_fraction": offloaded,
                "egress_gbps": egress,
            }
        )
    return rows


def _check_pins(problem: Problem) -> None:
    pinned, most = problem.variant.num_prefill, problem.capacity.num_pd
    if pinned is not None and pinned > most:
        raise InputError(f"n_pd={most}: the deployment pins num_prefill={pinned}; sweep from there on")


def heat_map(site: Site, options: SolveOptions, thresholds: int = 60) -> dict[str, Any]:
    """Λ over (threshold, N_p): `rates[i][j]` is that of N_p = i at thresholds_tokens[j]."""
    problem = pose(site, options)
    size = len(problem.lengths.tokens)
    # The best cut of every split is among the columns: a grid alone would miss the peaks.
    peaks = [
        int(rates(problem.loads, problem.capacity, split).argmax()) for split in range(problem.capacity.num_pd + 1)
    ]
    cuts = np.unique([*np.linspace(0, size, thresholds + 1).astype(np.int64), *peaks])
    tokens = np.where(cuts > 0, problem.lengths.tokens[np.maximum(cuts - 1, 0)], 0.0)
    grid = [
        rates(problem.loads, problem.capacity, split)[cuts].tolist() for split in range(problem.capacity.num_pd + 1)
    ]
    return {
        "thresholds_tokens": tokens.tolist(),
        "num_prefill": list(range(problem.capacity.num_pd + 1)),
        "rates": grid,
    }
