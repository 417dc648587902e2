"""Several PrfaaS and several PD clusters: for fixed splits a linear program, over all splits the best of them.

x[b, c, j] is the rate of requests in length bin b that prefill at c and decode at j. c is PrfaaS cluster i, or PD
cluster j's own prefill nodes. Λ is maximised such that

    every bin is served         Σ x[b, ·, ·]                = Λ · w_b,   or, where homes have shares h_j,
                                Σ x[b, ·, j]                = Λ · w_b · h_j
    PrfaaS compute              Σ x[b, i, j] · T_i(b)       ≤ N_i
    PD-P compute                Σ x[b, j, j] · T_j(b)       ≤ N_p,j
    every link's budget         Σ x[b, i, j] · S(b)         ≤ B_ij
    decode                      Σ x[b, c, j] · d_j          ≤ N_d,j

Prompts that decode nodes compute themselves are one more kind of request, whatever their lengths. Each takes d_j and its own
computing of the decode nodes of j, and nothing else. While decode nodes hold nothing, prefill nodes compute them, too: as the
others of their length, and within as many instances and bytes.

With few bins that are the lengths themselves this is exact, fractional routing included. A threshold per PD cluster falls out:
the length from which on requests that decode there are prefilled elsewhere. A gateway has one threshold for all: `at_threshold`
solves the same program with every longer length prefilled remotely and no other one, and tries every cut.

What it takes for granted: links and clusters are fluid, nothing waits, and lengths exclude what is cached. Where a PD
cluster has no share of its own (`home_share`), requests may be decoded wherever that serves most. A home has requests
of all lengths: a gateway cannot choose whose prompts are short.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from planner.decisions.views import ClusterKind
from planner.errors import Infeasible, InputError, needing_scipy
from planner.model.increments import full_chance, held_seconds
from planner.model.profile import Floats
from planner.model.site import Site
from planner.model.throughput import decode_seconds
from planner.model.traffic import Lengths
from planner.solve.decode_memory import decode_of
from planner.solve.search import COLD_BUSY, RECOMMENDED_LOAD
from planner.solve.watch import ProgressWatch, unwatched

BINS: Final = 60
MAX_SPLITS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fleet:
    """The numbers of the program. `links[i, j]` in bytes/s, `home[j]` the share of requests of every length that decode at j;
    `held_s[j]` what computing takes of a prompt that decode nodes of j compute.

    With cold caches the rate times `cold[b]` is prefilled for a rate of 1 now, and a prompt sends `cold_bytes[b]`.
    """

    lengths: Lengths
    remote_s: Floats  # [i, b]
    local_s: Floats  # [j, b]
    kv_bytes: Floats  # [b]
    decode_s: Floats  # [j]
    num_prfaas: Floats  # [i]
    num_pd: Sequence[int]
    links: Floats  # [i, j]
    home: Floats | None = None
    held_s: Floats | None = None
    cold: Floats | None = None
    cold_bytes: Floats | None = None

    def row_of(self, b: int, j: int) -> int:
        """What must be served together: a length, or a home's requests of that length."""
        return b if self.home is None else b * len(self.num_pd) + j


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FleetPlan:
    """Splits per PD cluster, and shares: `remote[b, i, j]`, `local[b, j]` and, on decode nodes, `held[j]` of all requests."""

    rate: float
    num_prefill: tuple[int, ...]
    remote: Floats
    local: Floats
    held: Floats

    def thresholds(self, lengths: Lengths) -> list[float | None]:
        """Per PD cluster, the longest length it still prefills itself; None when it prefills nothing."""
        found: list[float | None] = []
        for j in range(self.local.shape[1]):
            kept = np.flatnonzero(self.local[:, j] > 1e-9)
            found.append(float(lengths.tokens[kept[-1]]) if len(kept) else None)
        return found


Entry = tuple[int, int, float]  # row, column, value


@dataclass(frozen=True, slots=True, kw_only=True)
class RateColumns:
    """What the program decides, a rate each, one after the other: `remote` (b, i, j), `local` (b, j), `held` j, and then Λ."""

    remote: Sequence[tuple[int, int, int]]
    local: Sequence[tuple[int, int]]
    held: range

    @classmethod
    def of(cls, fleet: Fleet, num_prefill: Sequence[int], cut: int | None) -> Self:
        """Those that a split leaves, and a cut."""
        bins, prfaas, pd = len(fleet.lengths.prefilled), len(fleet.num_prfaas), len(fleet.num_pd)
        near, far = (range(bins), range(bins)) if cut is None else (range(cut), range(cut, bins))
        has_held = fleet.lengths.held_share and fleet.held_s is not None
        return cls(
            remote=[(b, i, j) for b in far for i in range(prfaas) for j in range(pd) if fleet.links[i, j] > 0],
            local=[(b, j) for b in near for j in range(pd) if num_prefill[j] > 0],
            held=range(pd) if has_held else range(0),
        )

    @property
    def prefilled(self) -> int:
        return len(self.remote) + len(self.local)

    @property
    def total_rate(self) -> int:
        """The column of Λ, the last."""
        return self.prefilled + len(self.held)


@dataclass(frozen=True, slots=True)
class LimitRows:
    """Which row of the program limits what. With cold caches all rows before decode stand again behind it."""

    prfaas: int
    pd: int

    def remote(self, i: int) -> int:
        return i

    def local(self, j: int) -> int:
        return self.prfaas + j

    def link(self, i: int, j: int) -> int:
        return self.prfaas + self.pd + i * self.pd + j

    @property
    def before_decode(self) -> int:
        return self.prfaas + self.pd + self.prfaas * self.pd

    def decode(self, j: int) -> int:
        return self.before_decode + j

    def cold(self, row: int) -> int:
        return self.before_decode + self.pd + row


def solve_split(fleet: Fleet, num_prefill: Sequence[int], cut: int | None = None) -> FleetPlan:
    """The best routing for fixed splits, by HiGHS. A rate of 0 when nothing can be served.

    With a `cut`, bins from it on are prefilled remotely, and those before it at home.
    """
    columns = RateColumns.of(fleet, num_prefill, cut)
    rows = LimitRows(len(fleet.num_prfaas), len(fleet.num_pd))
    taken = [*_taken(fleet, columns, rows), *_taken_when_cold(fleet, columns, rows)]
    served = _served(fleet, columns)
    equal = [*_served_by(fleet, columns), *((row, columns.total_rate, -float(w)) for row, w in enumerate(served))]
    found = _most(columns, taken, _limits(fleet, num_prefill), equal, len(served))
    return _plan(fleet, tuple(num_prefill), columns, found)


def _limits(fleet: Fleet, num_prefill: Sequence[int]) -> Floats:
    """What there is of each row: instances and bytes/s."""
    prefill = np.asarray(num_prefill, dtype=np.float64)
    before_decode = np.concatenate((fleet.num_prfaas, prefill, fleet.links.ravel()))
    again = () if fleet.cold is None else (before_decode,)
    return np.concatenate((before_decode, np.asarray(fleet.num_pd, dtype=np.float64) - prefill, *again))


def _taken(fleet: Fleet, columns: RateColumns, rows: LimitRows) -> Iterator[Entry]:
    """What a rate of 1 takes of each row."""
    for column, (b, i, j) in enumerate(columns.remote):
        yield rows.remote(i), column, fleet.remote_s[i, b]
        yield rows.link(i, j), column, fleet.kv_bytes[b]
        yield rows.decode(j), column, fleet.decode_s[j]
    for column, (b, j) in enumerate(columns.local, len(columns.remote)):
        yield rows.local(j), column, fleet.local_s[j, b]
        yield rows.decode(j), column, fleet.decode_s[j]
    if fleet.held_s is not None:
        for column, j in enumerate(columns.held, columns.prefilled):
            yield rows.decode(j), column, fleet.decode_s[j] + fleet.held_s[j]


def _taken_when_cold(fleet: Fleet, columns: RateColumns, rows: LimitRows) -> Iterator[Entry]:
    """The same for prefill and links, while caches have nothing."""
    cold = fleet.cold
    if cold is None:
        return
    for column, (b, i, j) in enumerate(columns.remote):
        if fleet.cold_bytes is not None:
            yield rows.cold(rows.remote(i)), column, cold[b] * fleet.remote_s[i, b]
            yield rows.cold(rows.link(i, j)), column, cold[b] * fleet.cold_bytes[b]
    for column, (b, j) in enumerate(columns.local, len(columns.remote)):
        yield rows.cold(rows.local(j)), column, cold[b] * fleet.local_s[j, b]


def _served(fleet: Fleet, columns: RateColumns) -> Floats:
    """Shares of all requests that are served together: by length, or by length and home; then those that decode nodes hold."""
    weights = fleet.lengths.prefilled
    prefilled = weights if fleet.home is None else np.outer(weights, fleet.home).ravel()
    if not columns.held:
        return prefilled
    return np.append(prefilled, fleet.lengths.held_share * (np.ones(1) if fleet.home is None else fleet.home))


def _served_by(fleet: Fleet, columns: RateColumns) -> Iterator[Entry]:
    """Which columns serve which of those shares."""
    for column, (b, _, j) in enumerate(columns.remote):
        yield fleet.row_of(b, j), column, 1.0
    for column, (b, j) in enumerate(columns.local, len(columns.remote)):
        yield fleet.row_of(b, j), column, 1.0
    first = len(fleet.lengths.prefilled) * (1 if fleet.home is None else len(fleet.home))
    for column, j in enumerate(columns.held, columns.prefilled):
        yield first if fleet.home is None else first + j, column, 1.0


def _most(columns: RateColumns, taken: list[Entry], limits: Floats, equal: list[Entry], shares: int) -> Floats:
    """The rates of all columns where Λ is greatest; zeros where nothing can be served."""
    # Takes a second to load, and one PD cluster needs no program.
    with needing_scipy("plans of several PD clusters"):
        from scipy.optimize import linprog

    count = columns.total_rate + 1
    # Rows in units of their own limit: bytes per second next to instances would lose the solver's tolerance.
    scale = np.where(limits > 0, limits, 1.0)
    objective = np.zeros(count)
    objective[columns.total_rate] = -1.0
    found = linprog(
        objective,
        A_ub=_sparse([(row, column, value / scale[row]) for row, column, value in taken], (len(limits), count)),
        b_ub=limits / scale,
        A_eq=_sparse(equal, (shares, count)),
        b_eq=np.zeros(shares),
        method="highs",
    )
    rates: Floats = found.x if found.status == 0 else np.zeros(count)
    return rates


def _plan(fleet: Fleet, num_prefill: tuple[int, ...], columns: RateColumns, rates: Floats) -> FleetPlan:
    """Those rates as shares of Λ."""
    bins, prfaas, pd = len(fleet.lengths.prefilled), len(fleet.num_prfaas), len(fleet.num_pd)
    remote, local, held = np.zeros((bins, prfaas, pd)), np.zeros((bins, pd)), np.zeros(pd)
    rate = float(rates[columns.total_rate])
    if rate > 0:
        for share, place in zip(rates / rate, columns.remote, strict=False):
            remote[place] = share
        for share, spot in zip(rates[len(columns.remote) :] / rate, columns.local, strict=False):
            local[spot] = share
        for share, j in zip(rates[columns.prefilled :] / rate, columns.held, strict=False):
            held[j] = share
    return FleetPlan(rate=rate, num_prefill=num_prefill, remote=remote, local=local, held=held)


def _sparse(entries: list[Entry], shape: tuple[int, int]) -> Any:
    from scipy.sparse import coo_array

    rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
    return coo_array((values, (rows, columns)), shape=shape).tocsr()


def solve_fleet(fleet: Fleet, watched: ProgressWatch = unwatched) -> FleetPlan:
    """The best splits and routing. Tries every combination of splits; raises InputError when there are too many."""
    choices = [range(count + 1) for count in fleet.num_pd]
    total = int(np.prod([len(choice) for choice in choices]))
    if total > MAX_SPLITS:
        raise InputError(f"{total} combinations of splits: at most {MAX_SPLITS}; plan the PD clusters in groups")
    best: FleetPlan | None = None
    for split in watched(list(itertools.product(*choices)), "splits"):
        bound = sum((n - p) / d for n, p, d in zip(fleet.num_pd, split, fleet.decode_s, strict=True))
        if best is not None and bound <= best.rate:
            continue  # its decode nodes alone could not beat what is known
        found = solve_split(fleet, split)
        if best is None or found.rate > best.rate * (1 + 1e-9):
            best = found
    if best is None or best.rate <= 0:
        raise Infeasible("no split serves any request: add decode instances, or a link to a PD cluster")
    return best


def at_threshold(fleet: Fleet, num_prefill: Sequence[int]) -> tuple[float, FleetPlan]:
    """The one threshold, in tokens, that serves most with these splits: lengths up to it stay at home."""
    bins = len(fleet.lengths.tokens)
    best = max((solve_split(fleet, num_prefill, cut) for cut in range(bins + 1)), key=lambda found: found.rate)
    longest = np.flatnonzero(best.local.sum(axis=1) > 0)
    return (float(fleet.lengths.tokens[longest[-1]]) if len(longest) else 0.0), best


def fleet_of(site: Site, bins: int = BINS, extrapolate: bool = False, *, survives_cold: bool = True) -> Fleet:
    """The site as a Fleet; lengths are thinned to `bins`. `survives_cold`: RECOMMENDED_LOAD is carried with cold caches, too."""
    prfaas, pd = site.of_kind(ClusterKind.PRFAAS), site.of_kind(ClusterKind.PD)
    profile = site.profile
    decodes = [decode_of(site, cluster.hardware) for cluster in pd]
    lengths = site.workload.lengths.thinned(bins).less_held(max(full_chance(each, 1.0) for each in decodes))
    for cluster in [*prfaas, *pd]:
        curve = profile.prefill_on(cluster.hardware)
        curve.check(site.workload.computed_tokens, f"T_prefill on {cluster.hardware}", extrapolate)
    links = np.array(
        [[link.bytes_per_s if (link := site.link(i.name, j.name)) else 0.0 for j in pd] for i in prfaas]
    ).reshape(len(prfaas), len(pd))
    cold = None
    if survives_cold and lengths.held is not None:
        cold = np.divide(
            lengths.weights, lengths.prefilled, out=np.ones_like(lengths.weights), where=lengths.prefilled > 0
        )
        cold *= RECOMMENDED_LOAD / COLD_BUSY
    return Fleet(
        lengths=lengths,
        remote_s=_times(profile, prfaas, lengths),
        local_s=_times(profile, pd, lengths),
        kv_bytes=profile.kv_size().beyond(*lengths.sent),
        decode_s=np.array([decode_seconds(d.max_running, d.full_step_s, site.workload.output_tokens) for d in decodes]),
        num_prfaas=np.array([cluster.instances for cluster in prfaas], dtype=np.float64),
        num_pd=[cluster.instances for cluster in pd],
        links=links,
        home=np.array([site.homes[cluster.name] for cluster in pd]) if site.homes else None,
        held_s=_held_times(profile, pd, lengths),
        cold=cold,
        cold_bytes=None if cold is None else profile.kv_size().beyond(*lengths.with_nothing_held().sent),
    )


def _held_times(profile: Any, clusters: Sequence[Any], lengths: Lengths) -> Floats | None:
    """What a prompt that decode nodes compute takes of them, in the mean."""
    if not (share := lengths.held_share):
        return None
    return np.array([held_seconds(lengths, profile.prefill_on(each.hardware)) / share for each in clusters])


def _times(profile: Any, clusters: Sequence[Any], lengths: Lengths) -> Floats:
    curves = [profile.prefill_on(cluster.hardware) for cluster in clusters]
    rows = [curve.after(lengths.uncached, lengths.cached) for curve in curves]
    return np.array(rows).reshape(len(clusters), len(lengths.tokens))


def fleet_json(site: Site, fleet: Fleet, plan: FleetPlan) -> dict[str, Any]:
    """A fleet plan as JSON: per PD cluster its split and threshold, per link what it carries."""
    prfaas, pd = site.of_kind(ClusterKind.PRFAAS), site.of_kind(ClusterKind.PD)
    threshold, served = at_threshold(fleet, plan.num_prefill)
    sent = np.einsum("bij,b->ij", plan.remote, fleet.kv_bytes) * plan.rate
    remote_busy = np.einsum("bij,ib->i", plan.remote, fleet.remote_s) * plan.rate
    return {
        "schema": 1,
        "site": site.name,
        "input_hash": site.input_hash,
        "lambda_max_req_per_s": plan.rate,
        "one_threshold": {"threshold_tokens": threshold, "lambda_max_req_per_s": served.rate},
        "length_bins": len(fleet.lengths.tokens),
        "pd_clusters": [
            {
                "name": cluster.name,
                "num_prefill": plan.num_prefill[j],
                "num_decode": cluster.instances - plan.num_prefill[j],
                "threshold_tokens": own,
                "decoded_fraction": float(plan.remote[:, :, j].sum() + plan.local[:, j].sum() + plan.held[j]),
                "offload_fraction": float(plan.remote[:, :, j].sum()),
                "held_fraction": float(plan.held[j]),
            }
            for j, (cluster, own) in enumerate(zip(pd, plan.thresholds(fleet.lengths), strict=True))
        ],
        "prfaas_clusters": [
            {
                "name": cluster.name,
                "instances": cluster.instances,
                "utilisation": float(remote_busy[i] / n) if n else 0.0,
            }
            for i, (cluster, n) in enumerate(zip(prfaas, fleet.num_prfaas, strict=True))
        ],
        "links": [
            {
                "source": i.name,
                "destination": j.name,
                "egress_gbps": float(sent[a, b] * 8e-9),
                "capacity_gbps": float(fleet.links[a, b] * 8e-9),
            }
            for a, i in enumerate(prfaas)
            for b, j in enumerate(pd)
            if fleet.links[a, b] > 0
        ],
        "provenance": site.provenances(),
    }
