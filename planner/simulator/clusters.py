"""Several clusters of a kind: where requests are at home, who computed and who answered them, results by cluster and link."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from planner.decisions.views import ClusterKind
from planner.model.profile import Floats
from planner.simulator.network.egress import SimulatedEgress
from planner.simulator.nodes.node import SimulatedRequest
from planner.simulator.scenario import Scenario

Busy = Mapping[tuple[str, str], tuple[float, float]]  # seconds, and available ones, by cluster and stage


def homes_of(scenario: Scenario, requests: int, seed: int) -> list[str]:
    """The PD cluster that must decode each request, by the scenario's shares; empty where load decides."""
    if not scenario.homes:
        return []
    names = list(scenario.homes)
    shares = np.cumsum([scenario.homes[name] for name in names])
    drawn = np.searchsorted(shares / shares[-1], np.random.default_rng((seed, 3)).random(requests), side="right")
    return [names[each] for each in drawn]


class RequestClusters:
    """By request the clusters that computed and answered it. Only kept where there are several of a kind."""

    def __init__(self, scenario: Scenario, requests: int) -> None:
        self._pools = scenario.pools
        self._number = {pool.name: number for number, pool in enumerate(scenario.pools)}
        self._computed, self._answered = (array("h", [-1]) * requests for _ in range(2))

    @staticmethod
    def are_several(scenario: Scenario) -> bool:
        kinds = Counter(pool.kind for pool in scenario.pools)
        return max(kinds.values()) > 1

    def note(self, job: SimulatedRequest) -> None:
        """A request has been answered. What crossed no link was computed where it was answered."""
        at_home = job.decode_node.pool.name
        self._computed[job.index] = self._number[at_home if job.egress is None else job.egress.wire.source]
        self._answered[job.index] = self._number[at_home]

    def counts(self) -> dict[str, int]:
        """Requests by "computed in to answered in"."""
        pairs = Counter(zip(self._computed, self._answered, strict=True))
        names = [pool.name for pool in self._pools]
        return {f"{names[one]} to {names[other]}": n for (one, other), n in sorted(pairs.items()) if one >= 0}

    def by_cluster(self, ttft_s: Floats, busy: Busy) -> dict[str, dict[str, float]]:
        """What each cluster did: how busy its stages were, what it computed, and for a PD cluster what its requests saw."""
        computed, answered = np.frombuffer(self._computed, np.int16), np.frombuffer(self._answered, np.int16)
        found = {}
        for number, pool in enumerate(self._pools):
            stages = {stage: part for (name, stage), part in sorted(busy.items()) if name == pool.name and part[1]}
            row: dict[str, float] = {f"{stage}_busy": busy_s / all_s for stage, (busy_s, all_s) in stages.items()}
            row["computed"] = int((computed == number).sum())
            if pool.kind is ClusterKind.PD:
                own = answered == number
                row["answered"] = int(own.sum())
                if own.any():
                    row["offloaded"] = float((computed[own] != number).mean())
                    row["ttft_mean_s"] = float(ttft_s[own].mean())
                    row["ttft_p90_s"] = float(np.quantile(ttft_s[own], 0.9))
            found[pool.name] = row
        return found


def by_link(links: Sequence[SimulatedEgress], horizon_s: float) -> dict[str, dict[str, float]]:
    """What each link carried, on average, and could, in Gbit/s."""
    return {
        f"{link.wire.source} to {link.wire.destination}": {
            "egress_gbps": float(link.sent_per_window(horizon_s, horizon_s)[0]) / horizon_s * 8e-9,
            "capacity_gbps": link.wire.capacity[0][1] * 8e-9,
        }
        for link in links
    }
