"""The exact search for threshold and prefill/decode split: argmax of equation (6).

Sorted lengths are cut at k: the k shortest stay local, the rest goes remote. For every k, prefix sums give the
seconds (or bytes) that an average request asks of each stage,

    local_s[k]    PD-P seconds        rises with k
    remote_s[k]   PrfaaS seconds      falls with k
    egress_bytes[k]                   falls with k
    decode_s      PD-D seconds        does not depend on k
    held_s        PD-D seconds        does not depend on k: prompts that decode nodes compute, as they hold the rest of them

and a rate Λ fits while Λ times the request's seconds stays below each stage's instances, so by equations (3) to (6)

    Λ(k, N_p) = min(N_prfaas/remote_s, B_out/egress_bytes, N_p/local_s, N_d/(decode_s + held_s)).

Where decode nodes compute prompts, prefill nodes must carry those, too, while decode nodes hold nothing. Else answers come
late, the next turns find nothing held either, and the queue of a start lasts. So the arrays of *cold* caches limit Λ, too.

Two service models fill the arrays: exactly, E[T(L)], or as in the paper, T(E[L]). The sums of the former are linear
inside an atom of the distribution. So the best share of an atom is where a rising and a falling line cross.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

import numpy as np

from planner.errors import InputError
from planner.model.increments import held_seconds
from planner.model.profile import Floats, KvSize, PrefillCurve
from planner.model.throughput import lambda_max, theta, theta_pd_d, theta_pd_p, theta_prfaas
from planner.model.traffic import Lengths
from planner.solve.goals import ServiceTime, TieBreak

Indices: TypeAlias = np.ndarray[tuple[int], np.dtype[np.intp]]

# Rates this close are the same rate: a plateau, not a peak.
TIE: Final = 1e-9
RECOMMENDED_LOAD: Final = 0.8  # of Λ
# How busy a stage may be with cold caches, at the load that is run: the rest is for recovering.
COLD_BUSY: Final = 0.9
# Splitting an atom must gain at least this much, else the plan stays a plain threshold.
WORTH_A_SHARE: Final = 1e-4


class Bottleneck(StrEnum):
    """What can bind."""

    PRFAAS = "prfaas_compute"
    EGRESS = "egress"
    PD_P = "pd_prefill"
    PD_D = "pd_decode"
    COLD = "cold_caches"  # one of the others, while decode nodes hold nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What there is to serve with. `decode_s` is what one request takes of a decode instance: T_decode·L_out/BS_max."""

    num_prfaas: float
    num_pd: int
    egress_bytes_per_s: float
    decode_s: float

    def __post_init__(self) -> None:
        for name in ("num_prfaas", "num_pd", "egress_bytes_per_s", "decode_s"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)}: must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColdLoads:
    """What an average request asks of prefill and line while decode nodes hold nothing: they compute no prompt, and lack all of
    its attention. Λ times `per_rate` of it must be carried: the load that is run, over what may then be busy.
    """

    local_s: Floats
    remote_s: Floats
    egress_bytes: Floats
    per_rate: float

    def at(self, cuts: Indices) -> "ColdLoads":
        return replace(
            self, local_s=self.local_s[cuts], remote_s=self.remote_s[cuts], egress_bytes=self.egress_bytes[cuts]
        )

    def scaled(self, *, local: float, remote: float) -> "ColdLoads":
        return replace(self, local_s=self.local_s * local, remote_s=self.remote_s * remote)


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """What an average request asks of each stage, for every cut k of `lengths` (arrays of len(lengths) + 1)."""

    lengths: Lengths
    offloaded: Floats  # p
    local_s: Floats
    remote_s: Floats
    egress_bytes: Floats
    ttft_s: Floats  # mean zero-queue TTFT; the transfer counted after the prefill, as in Table 6
    service: ServiceTime
    held_s: float = 0.0  # that decode nodes stand still for prompts
    cold: ColdLoads | None = None  # where they limit Λ

    def scaled(self, *, local: float = 1.0, remote: float = 1.0) -> "Loads":
        """The same traffic on hardware that takes these factors as long (T scales, so both service models do)."""
        cold = None if self.cold is None else self.cold.scaled(local=local, remote=remote)
        return replace(
            self, local_s=self.local_s * local, remote_s=self.remote_s * remote, held_s=self.held_s * local, cold=cold
        )


def _head_sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


def _tail_sums(values: Floats) -> Floats:
    # Summed from the end, so that the last cut is exactly 0 and not a rounding error that a dead link would divide.
    return np.concatenate((np.cumsum(values[::-1])[::-1], [0.0]))


def build_loads(
    lengths: Lengths,
    local: PrefillCurve,
    remote: PrefillCurve,
    kv: KvSize,
    *,
    egress_bytes_per_s: float,
    service: ServiceTime = ServiceTime.EXACT,
    cold_load: float | None = None,
) -> Loads:
    """Prefix sums over sorted lengths. O(n); the sort is `Lengths.of`'s.

    `cold_load` is the share of Λ that must be carried while decode nodes hold nothing, None where that does not matter.
    """
    tokens, weights, cached = lengths.uncached, lengths.prefilled, lengths.cached
    size = kv.beyond(*lengths.sent)
    transfer_s = size / egress_bytes_per_s if egress_bytes_per_s > 0 else np.full_like(size, np.inf)
    ttft_s = _head_sums(weights * local.after(tokens, cached)) + _tail_sums(
        weights * (remote.after(tokens, cached) + transfer_s)
    )
    cold = None
    if cold_load is not None and lengths.held is not None:
        stages = _stages(lengths.with_nothing_held(), local, remote, kv, service)
        cold = ColdLoads(**stages, per_rate=cold_load / COLD_BUSY)
    return Loads(
        lengths, _tail_sums(weights), **_stages(lengths, local, remote, kv, service), ttft_s=ttft_s, service=service,
        held_s=held_seconds(lengths, local), cold=cold,
    )  # fmt: skip


def _stages(
    lengths: Lengths, local: PrefillCurve, remote: PrefillCurve, kv: KvSize, service: ServiceTime
) -> dict[str, Floats]:
    """What every cut asks of prefill at home, of PrfaaS and of the line."""
    tokens, weights, cached = lengths.uncached, lengths.prefilled, lengths.cached
    if service is ServiceTime.EXACT:
        return {
            "local_s": _head_sums(weights * local.after(tokens, cached)),
            "remote_s": _tail_sums(weights * remote.after(tokens, cached)),
            "egress_bytes": _tail_sums(weights * kv.beyond(*lengths.sent)),
        }
    heads, tails = _head_sums(weights), _tail_sums(weights)
    head, tail = _over(_head_sums(weights * tokens), heads), _over(_tail_sums(weights * tokens), tails)
    head_cached = None if cached is None else _over(_head_sums(weights * cached), heads)
    tail_cached = None if cached is None else _over(_tail_sums(weights * cached), tails)
    return {
        "local_s": heads * local.after(head, head_cached),
        "remote_s": tails * remote.after(tail, tail_cached),
        "egress_bytes": tails * kv.beyond(tail, tail_cached),
    }


def _over(sums: Floats, shares: Floats) -> Floats:
    return np.divide(sums, shares, out=np.zeros_like(shares), where=shares > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A plan inside the search: `cut` lengths stay local, and `share` of the requests at the next one, too."""

    rate: float
    num_prefill: int
    num_decode: int
    cut: int
    share: float = 0.0


def _remote_rates(loads: Loads, capacity: Capacity) -> Floats:
    """Θ_prfaas / p for every cut."""
    most_s = _most(loads.remote_s, None if loads.cold is None else loads.cold.remote_s * loads.cold.per_rate)
    most_bytes = _most(
        loads.egress_bytes, None if loads.cold is None else loads.cold.egress_bytes * loads.cold.per_rate
    )
    return theta_prfaas(capacity.num_prfaas, most_s, capacity.egress_bytes_per_s, most_bytes)


def _local_s(loads: Loads) -> Floats:
    return _most(loads.local_s, None if loads.cold is None else loads.cold.local_s * loads.cold.per_rate)


def _most(warm: Floats, cold: Floats | None) -> Floats:
    return warm if cold is None else np.maximum(warm, cold)


def rates(loads: Loads, capacity: Capacity, num_prefill: int) -> Floats:
    """Λ for every cut. (6)"""
    return _rates(_local_s(loads), _remote_rates(loads, capacity), capacity, num_prefill, loads.held_s)


def _rates(local_s: Floats, remote: Floats, capacity: Capacity, num_prefill: int, held_s: float) -> Floats:
    decode = theta_pd_d(capacity.num_pd - num_prefill, capacity.decode_s + held_s)
    return lambda_max(remote, theta_pd_p(num_prefill, local_s), decode)


def cuts_of(loads: Loads, thresholds: Floats) -> Indices:
    """The cut that each threshold makes: how many lengths it keeps local."""
    return np.searchsorted(loads.lengths.tokens, thresholds, side="right")


def solve(
    loads: Loads,
    capacity: Capacity,
    *,
    num_prefill: int | None = None,
    thresholds: Floats | None = None,
    tie_break: TieBreak = TieBreak.EGRESS,
    worth_a_share: float = WORTH_A_SHARE,
) -> Cut:
    """The cut and split of highest Λ; ties go to the second goal, then to more decode instances.

    `num_prefill` pins the split. `thresholds` restricts the search to these values (the paper's grid); without it every
    distinct threshold is tried, and with exact service shares of an atom, too.
    """
    allowed = None if thresholds is None else np.unique(cuts_of(loads, thresholds))
    splits = range(capacity.num_pd + 1) if num_prefill is None else [num_prefill]
    remote = _remote_rates(loads, capacity)
    if allowed is not None:
        remote = remote[allowed]
    best: Cut | None = None
    for count in splits:
        found = _best_cut(loads, capacity, count, remote, allowed, tie_break)
        if allowed is None and loads.service is ServiceTime.EXACT:
            found = _with_shares(loads, capacity, found, worth_a_share)
        if best is None or _beats(loads, found, best, tie_break):
            best = found
    assert best is not None
    return best


def _best_cut(
    loads: Loads,
    capacity: Capacity,
    num_prefill: int,
    remote: Floats,
    allowed: Indices | None,
    tie_break: TieBreak,
) -> Cut:
    local_s = _local_s(loads) if allowed is None else _local_s(loads)[allowed]
    found = _rates(local_s, remote, capacity, num_prefill, loads.held_s)
    most = float(found.max())
    ties = np.flatnonzero(found >= most * (1 - TIE))
    if allowed is not None:
        ties = allowed[ties]
    cut = int(ties[np.argmin(_second_goal(loads, tie_break)[ties])])
    return Cut(
        rate=most,
        num_prefill=num_prefill,
        num_decode=capacity.num_pd - num_prefill,
        cut=cut,
    )


def _second_goal(loads: Loads, tie_break: TieBreak) -> Floats:
    return loads.egress_bytes if tie_break is TieBreak.EGRESS else loads.ttft_s


def _beats(loads: Loads, one: Cut, other: Cut, tie_break: TieBreak) -> bool:
    if abs(one.rate - other.rate) > TIE * other.rate:
        return one.rate > other.rate
    goal = _second_goal(loads, tie_break)
    return bool(goal[one.cut] < goal[other.cut])


def _with_shares(loads: Loads, capacity: Capacity, pure: Cut, worth: float) -> Cut:
    """`pure`, or a share of an atom next to it if that is better.

    The load is the maximum of a rising and falling lines, so the best point lies next to the best pure cut.
    """
    best = pure
    for cut in (pure.cut - 1, pure.cut):
        if not 0 <= cut < len(loads.offloaded) - 1:
            continue
        for share in _crossings(loads, capacity, pure.num_prefill, cut):
            rate = rate_at(loads, capacity, pure.num_prefill, cut, share)
            if rate > max(best.rate, pure.rate * (1 + worth)) * (1 + TIE):
                best = replace(best, rate=rate, cut=cut, share=share)
    return best


def _crossings(loads: Loads, capacity: Capacity, num_prefill: int, cut: int) -> list[float]:
    """Shares at which PD-P is as long at an average request as PrfaaS, or as the egress. Both sides multiplied out.

    Lines of cold caches cross those of full ones, too.
    """
    at = slice(cut, cut + 2)
    near, away, sent = [loads.local_s[at]], [loads.remote_s[at]], [loads.egress_bytes[at]]
    if (cold := loads.cold) is not None:
        near.append(cold.local_s[at] * cold.per_rate)
        away.append(cold.remote_s[at] * cold.per_rate)
        sent.append(cold.egress_bytes[at] * cold.per_rate)
    gaps = [
        fall * num_prefill - rise * limit
        for falls, limit in ((away, capacity.num_prfaas), (sent, capacity.egress_bytes_per_s))
        for fall in falls
        for rise in near
    ]
    return [float(gap[0] / (gap[0] - gap[1])) for gap in gaps if gap[0] > 0 > gap[1]]


def mixed(values: Floats, cut: int, share: float) -> float:
    """What an average request asks of a stage at one cut, `share` of the next length included."""
    if share == 0:
        return float(values[cut])
    return float(values[cut] + share * (values[cut + 1] - values[cut]))


def rate_at(loads: Loads, capacity: Capacity, num_prefill: int, cut: int, share: float = 0.0) -> float:
    """Λ at one cut, `share` of the next length included."""
    return min(stage_rates(loads, capacity, num_prefill, cut, share).values())


def stage_rates(
    loads: Loads, capacity: Capacity, num_prefill: int, cut: int, share: float = 0.0
) -> dict[Bottleneck, float]:
    """Requests/s that each stage lets the whole system serve (its Θ over its share of the requests); the least binds."""
    cold = cold_rates(loads, capacity, num_prefill, cut, share)
    least = {} if loads.cold is None else {Bottleneck.COLD: min(cold.values()) / loads.cold.per_rate}
    return {
        Bottleneck.PRFAAS: float(theta(capacity.num_prfaas, mixed(loads.remote_s, cut, share))),
        Bottleneck.EGRESS: float(theta(capacity.egress_bytes_per_s, mixed(loads.egress_bytes, cut, share))),
        Bottleneck.PD_P: float(theta_pd_p(num_prefill, mixed(loads.local_s, cut, share))),
        Bottleneck.PD_D: float(theta_pd_d(capacity.num_pd - num_prefill, capacity.decode_s + loads.held_s)),
        **least,
    }


def cold_rates(
    loads: Loads, capacity: Capacity, num_prefill: int, cut: int, share: float = 0.0
) -> dict[Bottleneck, float]:
    """The same while decode nodes hold nothing: at these rates a stage is always busy. Empty where that does not matter."""
    cold = loads.cold
    if cold is None:
        return {}
    return {
        Bottleneck.PRFAAS: float(theta(capacity.num_prfaas, mixed(cold.remote_s, cut, share))),
        Bottleneck.EGRESS: float(theta(capacity.egress_bytes_per_s, mixed(cold.egress_bytes, cut, share))),
        Bottleneck.PD_P: float(theta_pd_p(num_prefill, mixed(cold.local_s, cut, share))),
    }


@dataclass(frozen=True, slots=True)
class Interval:
    """Thresholds t with low ≤ t < high make the same plan, or one as good."""

    low_tokens: float
    high_tokens: float


def interval_of(loads: Loads, capacity: Capacity, found: Cut, within: float = TIE) -> Interval:
    """The thresholds around `found` whose rate is at least (1 − within) times the one found."""
    good = rates(loads, capacity, found.num_prefill) >= found.rate * (1 - within)
    low = high = found.cut
    if good[found.cut]:
        bad = np.flatnonzero(~good)
        at = int(np.searchsorted(bad, found.cut))
        low = int(bad[at - 1]) + 1 if at else 0
        high = int(bad[at]) - 1 if at < len(bad) else len(good) - 1
    tokens = loads.lengths.tokens
    return Interval(
        float(tokens[low - 1]) if low else 0.0,
        float(tokens[high]) if high < len(tokens) else float("inf"),
    )


def threshold_of(loads: Loads, found: Cut) -> float:
    """The threshold in tokens that makes a cut: a whole number where one exists, else the longest local length."""
    tokens = loads.lengths.tokens
    if found.share:
        return float(tokens[found.cut])
    if not found.cut:
        return 0.0
    low = float(tokens[found.cut - 1])
    whole = float(np.ceil(low))
    if found.cut == len(tokens) or whole < tokens[found.cut]:
        return whole
    return low


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """The least value that at least `share` of the weight does not exceed."""
    order = np.argsort(values)
    at = np.searchsorted(np.cumsum(weights[order]), share * weights.sum() - 1e-12)
    return float(values[order[min(int(at), len(values) - 1)]])
