"""Several clusters: the linear program against exhaustive search, and against the solver for one of each."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from membership.lines import Line
from planner.decisions.views import ClusterKind
from planner.errors import Infeasible, InputError
from planner.model.traffic import Lengths
from planner.solve.fleet import Fleet, at_threshold, fleet_json, fleet_of, solve_fleet, solve_split
from planner.solve.problem import SolveOptions, best_cut, pose


def small(seed: int, lengths: int = 2, prfaas: int = 2, pd: int = 2) -> Fleet:
    rng = np.random.default_rng(seed)
    tokens = np.sort(rng.choice(np.arange(100, 5000), lengths, replace=False)).astype(float)
    weights = rng.dirichlet(np.ones(lengths))
    return Fleet(
        lengths=Lengths(tokens, weights),
        remote_s=np.array([0.1 + tokens * rng.uniform(1e-4, 4e-4) for _ in range(prfaas)]),
        local_s=np.array([0.1 + tokens * rng.uniform(2e-4, 9e-4) for _ in range(pd)]),
        kv_bytes=1e6 + tokens * 1e3,
        decode_s=rng.uniform(0.1, 0.6, pd),
        num_prfaas=rng.integers(1, 3, prfaas).astype(float),
        num_pd=[int(n) for n in rng.integers(1, 4, pd)],
        links=rng.choice([0.0, 2e6, 2e7], (prfaas, pd)),
    )


def rate_of(fleet: Fleet, split, remote, local) -> float:
    """Λ of given shares, from the definition."""
    needs = [
        *((np.einsum("bj,b->", remote[:, i], fleet.remote_s[i]), fleet.num_prfaas[i]) for i in range(len(fleet.num_prfaas))),
        *((local[:, j] @ fleet.local_s[j], split[j]) for j in range(len(split))),
        *(
            (remote[:, i, j] @ fleet.kv_bytes, fleet.links[i, j])
            for i in range(len(fleet.num_prfaas))
            for j in range(len(split))
        ),
        *(
            ((remote[:, :, j].sum() + local[:, j].sum()) * fleet.decode_s[j], fleet.num_pd[j] - split[j])
            for j in range(len(split))
        ),
    ]  # fmt: skip
    if any(need > 1e-12 and have <= 0 for need, have in needs):
        return 0.0
    return min(have / need for need, have in needs if need > 1e-12)


def exhaustive(fleet: Fleet, steps: int) -> float:
    """The best Λ over all splits and all ways to cut each length's requests into `steps` equal parts."""
    prfaas, pd = fleet.links.shape
    places = [(i, j) for i in range(prfaas) for j in range(pd)] + [(None, j) for j in range(pd)]
    mixes = [c for c in itertools.product(range(steps + 1), repeat=len(places)) if sum(c) == steps]
    top = 0.0
    for split in itertools.product(*(range(n + 1) for n in fleet.num_pd)):
        usable = {k for k, (i, j) in enumerate(places) if (split[j] if i is None else fleet.links[i, j] > 0)}
        some = [mix for mix in mixes if all(k in usable or not part for k, part in enumerate(mix))]
        for choice in itertools.product(some, repeat=len(fleet.lengths.tokens)):
            remote = np.zeros((len(choice), prfaas, pd))
            local = np.zeros((len(choice), pd))
            for b, mix in enumerate(choice):
                for (i, j), part in zip(places, mix, strict=True):
                    share = fleet.lengths.weights[b] * part / steps
                    if i is None:
                        local[b, j] = share
                    else:
                        remote[b, i, j] = share
            top = max(top, rate_of(fleet, split, remote, local))
    return top


@pytest.mark.parametrize("seed", range(6))
def test_exhaustive_search_of_whole_classes_never_finds_better(seed):
    fleet = small(seed, lengths=3)
    found = solve_fleet(fleet)
    assert found.rate >= exhaustive(fleet, 1) * (1 - 1e-9)
    assert rate_of(fleet, found.num_prefill, found.remote, found.local) == pytest.approx(found.rate, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_finer_exhaustive_search_approaches_the_program_from_below(seed):
    fleet = small(seed, lengths=1, prfaas=1)
    found = solve_fleet(fleet).rate
    coarse, fine = exhaustive(fleet, 2), exhaustive(fleet, 24)
    assert coarse <= fine * (1 + 1e-9) <= found * (1 + 2e-9)
    assert fine == pytest.approx(found, rel=0.05)


def test_one_of_each_is_the_solver_for_one_of_each(case_study):
    thin = replace(case_study, workload=replace(case_study.workload, lengths=case_study.workload.lengths.thinned(60)))
    found = solve_fleet(fleet_of(thin))
    single = best_cut(pose(thin, SolveOptions()), SolveOptions())
    assert found.num_prefill == (single.num_prefill,)
    assert found.rate == pytest.approx(single.rate, rel=2e-3)
    assert found.rate >= single.rate * (1 - 1e-9)


def two_of_each(case_study):
    prfaas, pd = case_study.clusters
    clusters = (
        prfaas, replace(prfaas, name="prfaas-2", instances=2), pd, replace(pd, name="pd-2", instances=4)
    )  # fmt: skip
    links = tuple(
        Line(source=a, destination=b, capacity_gbps=gbps, provenance="unverified: test")
        for a, b, gbps in [("prfaas", "pd", 100), ("prfaas-2", "pd", 5), ("prfaas-2", "pd-2", 3)]
    )
    return replace(case_study, clusters=clusters, links=links)


def test_links_have_budgets_of_their_own(case_study):
    site = two_of_each(case_study)
    fleet = fleet_of(site, bins=20)
    result = fleet_json(site, fleet, solve_fleet(fleet))
    assert result["lambda_max_req_per_s"] > 3.2
    assert all(link["egress_gbps"] <= link["capacity_gbps"] * (1 + 1e-6) for link in result["links"])
    assert [cluster["name"] for cluster in result["pd_clusters"]] == ["pd", "pd-2"]
    assert sum(cluster["decoded_fraction"] for cluster in result["pd_clusters"]) == pytest.approx(1.0)


def test_requests_that_must_stay_at_home(case_study):
    fleet = replace(fleet_of(two_of_each(case_study), bins=12), home=np.array([0.2, 0.8]))
    found = solve_split(fleet, (2, 2))
    assert (found.remote[:, :, 0].sum() + found.local[:, 0].sum()) == pytest.approx(0.2)


def test_a_home_has_requests_of_all_lengths(case_study):
    prfaas, pd = case_study.clusters
    homes = (replace(pd, home_share=0.7), replace(pd, name="pd-2", instances=4, home_share=0.3))
    links = tuple(
        Line(source="prfaas", destination=to, capacity_gbps=gbps, provenance="unverified: test")
        for to, gbps in (("pd", 100), ("pd-2", 2))
    )
    site = replace(case_study, clusters=(prfaas, *homes), links=links)
    fleet = fleet_of(site)
    found = solve_split(fleet, (5, 2))
    decoded = found.remote.sum(axis=1) + found.local
    assert decoded == pytest.approx(np.outer(fleet.lengths.weights, [0.7, 0.3]), abs=1e-6)
    assert found.rate == pytest.approx(2.995, abs=2e-3)
    assert solve_split(fleet, (5, 3)).rate < found.rate > solve_split(fleet, (4, 2)).rate
    threshold, served = at_threshold(fleet, (5, 2))
    assert (threshold, served.rate) == (pytest.approx(41_468, rel=0.01), pytest.approx(2.960, abs=3e-3))


def test_one_threshold_serves_no_more_than_one_for_each_and_one_of_each_as_much(case_study):
    fleet = fleet_of(two_of_each(case_study), bins=20)
    best = solve_fleet(fleet)
    threshold, one = at_threshold(fleet, best.num_prefill)
    assert 0.8 * best.rate < one.rate <= best.rate * (1 + 1e-6)
    far = fleet.lengths.tokens > threshold
    assert one.local[far].sum() == 0
    assert one.remote[~far].sum() == 0
    thin = replace(case_study, workload=replace(case_study.workload, lengths=case_study.workload.lengths.thinned(60)))
    single = best_cut(pose(thin, SolveOptions()), SolveOptions())
    assert at_threshold(fleet_of(thin), (single.num_prefill,))[1].rate == pytest.approx(single.rate, rel=0.02)


def test_the_site_says_who_must_stay_at_home(case_study):
    site = two_of_each(case_study)
    shares = {"pd": 0.75, "pd-2": 0.25}
    clusters = tuple(replace(cluster, home_share=shares.get(cluster.name, 0.0)) for cluster in site.clusters)
    assert fleet_of(replace(site, clusters=clusters), bins=5).home.tolist() == [0.75, 0.25]
    assert fleet_of(site, bins=5).home is None


def test_nothing_to_decode_with_is_infeasible(case_study):
    fleet = replace(fleet_of(case_study, bins=5), num_pd=[0])
    with pytest.raises(Infeasible):
        solve_fleet(fleet)


def test_too_many_splits_are_refused(case_study):
    fleet = replace(fleet_of(case_study, bins=5), num_pd=[200] * 3)
    with pytest.raises(InputError, match="at most"):
        solve_fleet(fleet)


def test_pose_refers_several_clusters_here(case_study):
    assert len(two_of_each(case_study).of_kind(ClusterKind.PRFAAS)) == 2
    with pytest.raises(InputError, match="2 prfaas and 2 pd"):
        pose(two_of_each(case_study), SolveOptions())


@pytest.mark.parametrize(("weights", "held"), [((1, 1, 1, 1), (0.8, 0.1, 0, 0)), ((5, 5, 1, 1), (0.9, 0.9, 0, 0))])
def test_prompts_on_decode_nodes_are_the_solvers_for_one_of_each(case_study, weights, held):
    """Cold caches limit the second."""
    tokens = np.array([500.0, 4_000.0, 20_000.0, 60_000.0])
    lengths = Lengths(
        tokens, np.array(weights) / sum(weights), held=np.array(held, dtype=float), cached=np.full(4, 3e3)
    )
    workload = replace(case_study.workload, lengths=lengths, output_tokens=300.0 if held[1] == 0.9 else 1_024.0)
    site = replace(case_study, workload=workload)
    fleet, problem = fleet_of(site), pose(site, SolveOptions())
    found = best_cut(problem, SolveOptions())
    assert at_threshold(fleet, [found.num_prefill])[1].rate == pytest.approx(
        best_cut(problem.pinned(found.num_prefill), SolveOptions(grid_tokens=1)).rate, rel=1e-6
    )
    plan = solve_split(fleet, [found.num_prefill])
    assert plan.rate >= found.rate * (1 - 1e-9)
    warm = best_cut(problem.warm(), SolveOptions())
    assert (found.rate < 0.99 * warm.rate) == (held[1] == 0.9)
    assert solve_fleet(fleet_of(site, survives_cold=False)).rate >= warm.rate * (1 - 1e-9)
    assert plan.held.sum() == pytest.approx(problem.lengths.held_share)
    assert plan.remote.sum() + plan.local.sum() + plan.held.sum() == pytest.approx(1)


def test_each_home_has_its_share_of_what_decode_nodes_compute():
    lengths = Lengths(np.array([500.0, 4_000.0]), np.array([0.5, 0.5]), held=np.array([0.6, 0.0]))
    fleet = replace(
        small(0), lengths=lengths, held_s=np.array([0.05, 0.2]), home=np.array([0.3, 0.7]),
        remote_s=np.full((2, 2), 0.3), local_s=np.full((2, 2), 0.4), kv_bytes=np.full(2, 2e6), num_pd=[4, 6],
    )  # fmt: skip
    plan = solve_split(fleet, [2, 3])
    assert plan.held == pytest.approx([0.3 * 0.3, 0.3 * 0.7])
    decoded = plan.remote.sum(axis=(0, 1)) + plan.local.sum(axis=0) + plan.held
    assert decoded == pytest.approx([0.3, 0.7])
    assert ((decoded * fleet.decode_s + plan.held * fleet.held_s) * plan.rate <= np.array([2, 3]) + 1e-9).all()
