"""A plan beside its simulation, at the simulated rate, and what makes the difference."""

from collections.abc import Mapping
from typing import Any, Final

from planner.solve.plan import Plan

LEAST_SHARE: Final = 0.005  # of the requests, that is worth a word
WHYS: Final = {
    "decode no_prefill": "computed on decode nodes: no prefill node was there",
    "remote remote_prefix": "sent where their prefix was",
    "local congested": "kept from a full link",
    "local remote_queue": "kept from PrfaaS queues",
    "local link_down": "kept from a link that was down",
    "remote no_local_prefill": "sent away: no prefill node was at home",
}


def promised(
    plan: Plan, report: Mapping[str, Any], rate: float, planned_hit_ratio: float | None, *, is_replayed: bool = False
) -> list[dict[str, Any]]:
    """What a plan promises at a rate, and what was simulated. Without TTFT where the plan would not carry the rate.

    `is_replayed`: the plan's TTFT is that of the requests in their order.
    """
    return [
        {
            "": "found cached",
            "plan": planned_hit_ratio,
            "simulated": report["hit_ratio"],
            "why": _cached(planned_hit_ratio, report["hit_ratio"]),
        },
        {
            "": "offloaded",
            "plan": _either(plan.asked_offload_fraction, plan.offload_fraction),
            "simulated": report["offload_fraction"],
            "why": _routed(report) or "by the threshold alone",
        },
        {
            "": "on decode nodes",
            "plan": _either(plan.asked_held_fraction, plan.held_fraction),
            "simulated": report["routes"].get("decode held", 0) / (sum(report["routes"].values()) or 1),
            "why": "computed on decode nodes, which hold the rest of them",
        },
        {
            "": "egress, Gbit/s",
            "plan": _either(plan.asked_egress_gbps, plan.egress_gbps * rate / plan.lambda_max),
            "simulated": report["egress_mean_gbps"],
            "why": "plans send whole prompts; decode nodes lack less" if report["hit_ratio"] else "as offloaded",
        },
        {
            "": "TTFT mean, s",
            "plan": plan.asked_ttft_mean_s,
            "simulated": report["ttft_mean_s"],
            "why": _queued(plan, rate, is_replayed),
        },
        {"": "TTFT P90, s", "plan": plan.asked_ttft_p90_s, "simulated": report["ttft_p90_s"], "why": ""},
        *_targets(plan, report),
    ]


def _targets(plan: Plan, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Shares in time."""
    return [
        {
            "": f"{row.requests}, in time",
            "plan": row.share_in_time if plan.asked_ttft_mean_s is not None else None,
            "simulated": report["by_target"].get(row.requests, {}).get("share_in_time"),
            "why": f"within {row.ttft_s:g} s",
        }
        for row in plan.targets
    ]


def _either(at_rate: float | None, at_most: float) -> float:
    return at_most if at_rate is None else at_rate


def _cached(planned: float | None, simulated: float) -> str:
    if not planned or simulated >= planned - LEAST_SHARE:
        return ""
    if not simulated:
        return "simulated nodes cache nothing: whole prompts are compared with t, and computed"
    return "plans have one cache per PD cluster, with the answers' blocks; nodes have their own"


def _routed(report: Mapping[str, Any]) -> str:
    """What did not go by the threshold."""
    total = sum(report["routes"].values()) or 1
    shares = {route: count / total for route, count in report["routes"].items()}
    return "; ".join(
        f"{share:.1%} {WHYS[route]}" for route, share in shares.items() if route in WHYS and share > LEAST_SHARE
    )


def _queued(plan: Plan, rate: float, is_replayed: bool) -> str:
    if plan.asked_ttft_mean_s is None:
        return f"{rate:.3f} req/s is more than the plan carries, {plan.lambda_max:.3f}"
    how = "plans have Poisson arrivals and one queue per cluster"
    if is_replayed:
        how = "the plan replays the trace, with nodes chosen by their true queues"
    return f"at {rate:.3f} req/s, {rate / plan.lambda_max:.0%} of Λ; {how}"
