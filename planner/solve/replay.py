"""A plan under the arrivals of its trace: what the closed form of `loaded.py` takes for independent comes in its own order.

Requests are taken in order of arrival, each by the way that the plan says. A prefill node is a queue of its own, and so is the
line. A decode node has its places, and its batch stands still while it computes prompts. Caches hold what `fit` found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Final

import numpy as np

from planner.decisions.defaults import DEPLOYED
from planner.model.profile import Floats
from planner.model.queueing import Ttft
from planner.model.trace_files.arrivals import KeptArrivals
from planner.solve.problem import Problem
from planner.solve.search import Cut, threshold_of
from planner.solve.targets import Goal, are_kept

STEPS: Final = 12  # of a bisection: within a four-thousandth of the highest rate
REMOTE_QUEUE_S: Final = 10.0  # as `RoutingPolicy`: a PrfaaS queue that much longer than at home sends requests back
PHASE: Final = 0.6180339887498949  # spreads places evenly


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What each request asks of either prefill, of the line and of decode."""

    arrivals: KeptArrivals
    far: Floats  # 1 where the threshold sends a request away
    near_s: Floats
    far_s: Floats
    line_s: Floats
    held_s: Floats
    answer_s: Floats
    at_server_s: float
    num_prfaas: int
    num_prefill: int
    num_decode: int
    places: int

    @classmethod
    def of(cls, problem: Problem, found: Cut, arrivals: KeptArrivals) -> "Replay":
        computed, cached = arrivals.computed, arrivals.cached
        sizes = problem.kv.beyond(computed + cached - arrivals.landed, arrivals.landed)
        egress, decode = problem.capacity.egress_bytes_per_s, problem.decode
        near_s, at_server_s = problem.local.after(computed, cached), float(problem.local(0))
        return cls(
            arrivals=arrivals,
            far=(arrivals.tokens > threshold_of(problem.loads, found)).astype(np.float64),
            near_s=near_s,
            far_s=problem.remote.after(computed, cached),
            line_s=sizes / egress if egress else np.full_like(sizes, inf),
            held_s=near_s - at_server_s,
            answer_s=arrivals.output * decode.full_step_s,
            at_server_s=at_server_s,
            num_prfaas=int(problem.capacity.num_prfaas) if egress else 0,
            num_prefill=found.num_prefill,
            num_decode=found.num_decode,
            places=decode.max_running,
        )

    def highest_rate(self, limit: float, goals: Sequence[Goal]) -> float:
        """The largest rate up to `limit` at which all goals are kept, 0 if none is."""
        if self.keeps(limit, goals):
            return limit
        low, high = 0.0, limit
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.keeps(middle, goals) else (low, middle)
        return low

    def keeps(self, rate: float, goals: Sequence[Goal]) -> bool:
        return are_kept(goals, self.arrivals, self.ttfts_s(rate))

    def at(self, rate: float) -> Ttft:
        found = self.ttfts_s(rate)
        return Ttft(mean_s=float(found.mean()), p90_s=float(np.quantile(found, 0.9)))

    def ttfts_s(self, rate: float) -> Floats:
        """TTFT of each request, where they come at `rate` in the mean."""
        arrived = self.arrivals.at(rate)
        ready, node, held = self._prefilled(arrived)
        started = np.empty_like(ready)
        for which in range(self.num_decode):
            mine = np.flatnonzero(node == which)
            started[mine] = self._decoded(arrived[mine], ready[mine], held[mine], self.answer_s[mine])
        return started - arrived

    def _prefilled(self, arrived: Floats) -> tuple[Floats, Floats, Floats]:
        """When the KVCache of each is with its decode node, which node that is, and what of its GPUs that took."""
        count = len(arrived)
        home, away = [0.0] * self.num_prefill, [0.0] * self.num_prfaas
        busy = [0.0] * self.num_decode  # until when with prompts
        ends: list[list[float]] = [[] for _ in range(self.num_decode)]  # of the requests of each decode node
        line_free = 0.0
        ready, node, held = np.empty(count), np.empty(count), np.zeros(count)
        columns = (
            arrived, self.far, self.arrivals.held, self.near_s, self.far_s, self.line_s, self.held_s, self.answer_s
        )  # fmt: skip
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for at, (now, is_far, is_held, near_s, far_s, line_s, held_s, answer_s) in enumerate(rows):
            for each in ends:
                while each and each[0] <= now:
                    heappop(each)
            holder = int(at * PHASE % 1 * self.num_decode)
            which = min(range(self.num_decode), key=lambda one: len(ends[one]))
            if (is_held > 0.5 and len(ends[holder]) < self.places) or not (home or away):
                which = holder if is_held > 0.5 else which
                start = max(now, busy[which])
                busy[which] = start + held_s
                held[at] = held_s
                done = busy[which] + self.at_server_s
            elif away and (
                not home or (is_far and max(away[0] - now, 0.0) <= max(home[0] - now, 0.0) + REMOTE_QUEUE_S)
            ):
                start = max(now, away[0])
                heapreplace(away, start + far_s)
                line_free = max(line_free, start) + line_s  # layers leave while later ones are computed
                done = max(start + far_s + DEPLOYED.tail_share * line_s, line_free)
            else:
                start = max(now, home[0])
                heapreplace(home, start + near_s)
                done = start + near_s
            ready[at], node[at] = done, which
            heappush(ends[which], done + answer_s)
        return ready, node, held

    def _decoded(self, arrived: Floats, ready: Floats, held: Floats, answer_s: Floats) -> Floats:
        """When each gets a place of one decode node, in the order in which they are ready."""
        started = np.empty_like(ready)
        if not len(ready):
            return started
        span_s = max(float(ready.max() - arrived.min()), 1e-9)
        stretched = answer_s / max(1e-3, 1.0 - float(held.sum()) / span_s)
        places = [0.0] * self.places
        for at in np.argsort(ready, kind="stable").tolist():
            start = max(float(ready[at]), places[0])
            heapreplace(places, start + float(stretched[at]))
            started[at] = start
        return started
