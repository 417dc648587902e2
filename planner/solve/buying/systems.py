"""Systems that could be run: each carries a rate within the SLO, and no smaller one of its kind does.

    prfaas        PrfaaS nodes behind a line, and a PD cluster
    bigger local  the same hardware beside the PD cluster: no line, nothing is paid for what is sent
    homogeneous   the PD cluster alone
    colocated     nodes of the PD cluster that compute prompts and decode: a batch stands still for each prompt

Without a target for TTFT stages may be busy for a share of the time that leaves queues short (RECOMMENDED_LOAD), and lines
always: transfers are taken to have all of the line, which holds of one that is not full.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from math import ceil, floor, inf, isfinite
from typing import Final, Self

import numpy as np

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.model.market import LineOffer
from planner.model.profile import DecodeProfile, Floats
from planner.model.queueing import NO_WAIT_S, LoadedStations, Station, Wait, mgk_wait
from planner.model.throughput import decode_seconds
from planner.model.trace_files.arrivals import KeptArrivals
from planner.solve.loaded import NOTHING, LoadedTtft, loaded_ttft
from planner.solve.problem import Problem
from planner.solve.search import RECOMMENDED_LOAD, Bottleneck, Cut, stage_rates, threshold_of
from planner.solve.targets import Goal

THRESHOLDS: Final = 24  # that are tried: even shares of the requests
QUEUE_BINS: Final = 250  # of lengths, by which their queues are compared
MOST_SPARE: Final = 24  # instances of a stage beyond those that it needs without queues
NO_GAIN: Final = 1e-6  # of late requests, by one more instance
HOME_GBPS: Final = 1e5  # between nodes of one cluster
BATCHES: Final = 16  # sizes of decode batches that are tried on colocated nodes
LONGEST: Final = 10.0  # a request's tenth part of the intervals between tokens is what TBT is the mean of


class Contender(StrEnum):
    """A way to serve."""

    PRFAAS = "prfaas"
    BIGGER_LOCAL = "bigger_local_prefill"
    HOMOGENEOUS = "homogeneous"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSystem:
    """Instances, a line, and a threshold, for one rate. `busy` is how busy each stage is at it."""

    contender: Contender
    num_prfaas: int
    num_prefill: int
    num_decode: int
    line: LineOffer | None
    threshold_tokens: float
    sent_bytes: float  # per request
    busy: tuple[tuple[str, float], ...]
    decode_batch: int = 0

    @property
    def num_pd(self) -> int:
        return self.num_prefill + self.num_decode

    def at_tariff(self, per_gb: float) -> Self:
        """The same where its line costs so much per gigabyte."""
        return self if self.line is None else replace(self, line=replace(self.line, per_gb=per_gb))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """What has to be carried: `problem` has the lengths and profiles, and decode batches that keep the target for TBT."""

    problem: Problem
    output_tokens: float
    goals: tuple[Goal, ...] = ()
    tbt_s: float | None = None
    arrivals: KeptArrivals | None = None  # where a trace has said them


def with_prfaas(
    sought: Sought, rate: float, line: LineOffer | None, contender: Contender = Contender.PRFAAS
) -> Iterator[SizedSystem]:
    """All with PrfaaS nodes that may be worth it, for even shares of the requests that are sent away."""
    problem = sought.problem
    if problem.prfaas is not None:
        gbps = HOME_GBPS if line is None else line.gbps
        wired = problem.with_capacity(egress_bytes_per_s=gbps * BYTES_PER_S_PER_GBPS)
        for cut in even_cuts(problem)[:-1]:
            yield from _sized(sought, wired, rate, cut, line, contender)


def homogeneous(sought: Sought, rate: float) -> Iterator[SizedSystem]:
    """The PD cluster alone."""
    alone = sought.problem.with_capacity(num_prfaas=0, egress_bytes_per_s=0.0)
    yield from _sized(sought, alone, rate, len(alone.lengths.tokens), None, Contender.HOMOGENEOUS)


def colocated(sought: Sought, rate: float) -> Iterator[SizedSystem]:
    """Nodes that do both. Their batches stand still for a share ρ of the time, and TBT is Mooncake's: the mean of a request's
    longest tenth of token intervals, which all of these are among: step · (1 + 10 ρ / (1 − ρ)).
    """
    best: SizedSystem | None = None
    for batch in _batches(sought):
        best = _colocated(sought, batch, rate, best.num_decode if best else inf) or best
    if best is not None:
        yield best


def _batches(sought: Sought) -> Sequence[DecodeProfile]:
    """The decode batches that are tried: smaller ones, where their steps are shorter, up to the largest."""
    decode = sought.problem.decode
    if not decode.step_s_per_request:
        return [decode]
    sizes = {ceil(decode.max_running * share) for share in np.linspace(1.0, 0.0, BATCHES, endpoint=False)}
    return [replace(decode, max_running=size) for size in sorted(sizes)]


def _colocated(sought: Sought, decode: DecodeProfile, rate: float, below: float) -> SizedSystem | None:
    """The least nodes with these batches; None where fewer than `below` do not do."""
    problem = sought.problem
    decode_s = float(decode_seconds(decode.max_running, decode.full_step_s, sought.output_tokens))
    lengths = problem.asked.thinned(QUEUE_BINS)
    station = Station(
        weights=lengths.weights,
        prefill_s=problem.local.after(lengths.uncached, lengths.cached),
        after_s=np.zeros_like(lengths.tokens),
        servers=1,
        burst_index=problem.burst_index,
    )
    compute_s = float(station.weights @ station.prefill_s)
    per_request_s = compute_s + decode_s
    most_share = 1.0
    if sought.tbt_s is not None:
        extra = max(0.0, (sought.tbt_s / decode.full_step_s - 1.0) / LONGEST)
        most_share = extra / (1.0 + extra)
    if not most_share:
        return None
    most_busy = 1.0 if sought.goals else RECOMMENDED_LOAD
    queue = _Queue(station, [(goal.ttft_s, goal.members(lengths)) for goal in sought.goals])
    most_late = queue.most_late(sought.goals) + NOTHING
    least = _instances(max(rate * per_request_s / most_busy, rate * compute_s / most_share))
    for nodes in range(least, int(min(least + MOST_SPARE, below))):
        if sought.goals:
            wait = _decode_wait(decode, sought.output_tokens, rate, nodes, compute_s)
            if (queue.late(nodes, rate, wait) > most_late).any():
                continue
        return SizedSystem(
            contender=Contender.COLOCATED, num_prfaas=0, num_prefill=0, num_decode=nodes, line=None,
            threshold_tokens=inf, sent_bytes=0.0, busy=(("nodes", rate * per_request_s / nodes),),
            decode_batch=decode.max_running,
        )  # fmt: skip
    return None


def even_cuts(problem: Problem) -> list[int]:
    """Cuts that keep even shares of the requests, from none to all."""
    shares = np.cumsum(problem.lengths.weights)
    wanted = np.linspace(0.0, 1.0, THRESHOLDS + 1) * shares[-1] * (1 - 1e-12)
    return sorted({int(cut) for cut in np.searchsorted(shares, wanted)} | {0, len(shares)})


def _instances(busy: float) -> int:
    """So many that they are not busy all the time."""
    return floor(busy) + 1 if busy > 0 else 0


def _sized(
    sought: Sought, problem: Problem, rate: float, cut: int, line: LineOffer | None, contender: Contender
) -> Iterator[SizedSystem]:
    """The least instances at one threshold."""
    busy = _busy(problem, cut, rate)
    if busy[Bottleneck.EGRESS] > RECOMMENDED_LOAD:
        return
    for far, near, decode in _counts(sought, problem, rate, cut, busy):
        sized = problem.with_capacity(num_prfaas=far, num_pd=near + decode)
        limits = stage_rates(sized.loads, sized.capacity, near, cut)
        yield SizedSystem(
            contender=contender,
            num_prfaas=far,
            num_prefill=near,
            num_decode=decode,
            line=line,
            threshold_tokens=threshold_of(problem.loads, Cut(rate=rate, num_prefill=near, num_decode=decode, cut=cut)),
            sent_bytes=float(problem.loads.egress_bytes[cut]),
            busy=tuple((str(stage), rate / limit) for stage, limit in limits.items() if 0 < limit < inf),
            decode_batch=problem.decode.max_running,
        )


def _busy(problem: Problem, cut: int, rate: float) -> dict[Bottleneck, float]:
    """Instances of each stage that are busy at a rate, or must be there with cold caches; of the line, the share."""
    loads, cold = problem.loads, problem.loads.cold
    asked = [loads.remote_s[cut], loads.local_s[cut], loads.egress_bytes[cut]]
    if cold is not None:
        limits = (cold.remote_s, cold.local_s, cold.egress_bytes)
        asked = [max(warm, each[cut] * cold.per_rate) for warm, each in zip(asked, limits, strict=True)]
    far, near, sent = (float(each) * rate for each in asked)
    line = sent / problem.capacity.egress_bytes_per_s if sent else 0.0
    decode = rate * (problem.capacity.decode_s + loads.held_s)
    return {Bottleneck.PRFAAS: far, Bottleneck.PD_P: near, Bottleneck.PD_D: decode, Bottleneck.EGRESS: line}


def _counts(
    sought: Sought, problem: Problem, rate: float, cut: int, busy: dict[Bottleneck, float]
) -> Iterator[tuple[int, int, int]]:
    """Instances of PrfaaS, PD prefill and PD decode: for each number of the first the least of the others."""
    stages = (Bottleneck.PRFAAS, Bottleneck.PD_P, Bottleneck.PD_D)
    if not sought.goals:
        far, near, decode = (ceil(busy[stage] / RECOMMENDED_LOAD - 1e-9) for stage in stages)
        yield far, near, decode
        return
    split = Cut(rate=rate, num_prefill=1, num_decode=1, cut=cut)
    queues = loaded_ttft(problem, split, sought.output_tokens, problem.lengths.thinned(QUEUE_BINS), sought.goals)
    at_home, away, *held = _queues(queues)
    most_late = sum((each.most_late(sought.goals) for each in (at_home, away, *held)), np.zeros(len(sought.goals)))
    least_far, least_near, least_decode = (_instances(busy[stage]) for stage in stages)
    found: list[tuple[int, int, int]] = []
    for decode in range(least_decode, least_decode + MOST_SPARE):
        wait = _decode_wait(problem.decode, sought.output_tokens, rate, decode, queues.held_s)
        if not isfinite(wait.mean_s):
            continue
        spare = most_late - sum(each.late(decode, rate, wait) for each in held) + NOTHING
        home = at_home.lateness(least_near, rate, wait)
        for more, late_away in enumerate(away.lateness(least_far, rate, wait)):
            enough = next((count for count, each in enumerate(home) if (each + late_away <= spare).all()), None)
            if enough is not None:
                found.append((least_far + more, least_near + enough, decode))
        if wait.mean_s < NO_WAIT_S:
            break
    best: dict[int, tuple[int, int, int]] = {}
    for each in sorted(found, key=lambda each: (each[0], each[1] + each[2], each[2])):
        best.setdefault(each[0], each)
    least = inf
    for far, near, decode in best.values():
        if near + decode < least:
            least = near + decode
            yield far, near, decode


@dataclass(frozen=True, slots=True)
class _Queue:
    """A station, and for each goal its seconds and its share of the requests of each length."""

    station: Station
    goals: Sequence[tuple[float, Floats]]

    def most_late(self, goals: Sequence[Goal]) -> Floats:
        """The shares of all requests that may be late, of those that come by."""
        return np.array(
            [goal.late * float(self.station.weights @ own) for goal, (_, own) in zip(goals, self.goals, strict=True)]
        )

    def late(self, servers: int, rate: float, wait: Wait) -> Floats:
        """The shares of all requests that come by and are late, by goal."""
        loaded = LoadedStations.at([replace(self.station, servers=servers)], wait, rate)
        return np.array([loaded.late(seconds, [own]) for seconds, own in self.goals])

    def lateness(self, least: int, rate: float, wait: Wait) -> Sequence[Floats]:
        """The same with so many instances, one more, and so on while it helps."""
        if not self.station.weights.sum():
            return [np.zeros(len(self.goals))]
        found: list[Floats] = []
        for servers in range(least, least + MOST_SPARE):
            found.append(self.late(servers, rate, wait))
            if len(found) > 1 and (found[-2] - found[-1]).max() < NO_GAIN:
                break
        return found


def _queues(loaded: LoadedTtft) -> list[_Queue]:
    return [
        _Queue(station, [(goal.ttft_s, members[at]) for goal, members in loaded.goals])
        for at, station in enumerate(loaded.stations)
    ]


def late(station: Station, rate: float, decode: Wait, seconds: float) -> float:
    """The share of all requests that come by this station and whose TTFT is above `seconds`."""
    return LoadedStations.at([station], decode, rate).late(seconds)


@lru_cache(maxsize=4096)
def _decode_wait(batch: DecodeProfile, output_tokens: float, rate: float, num_decode: int, held_s: float) -> Wait:
    """For a place in decode, whose batches stand still for `held_s` per request."""
    service_s = batch.full_step_s * output_tokens + held_s * batch.max_running
    return mgk_wait(rate, num_decode * batch.max_running, service_s, service_s**2)
