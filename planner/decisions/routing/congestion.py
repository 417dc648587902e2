"""Measures how congested a link is, and whether its bandwidth is scarce."""

from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import LinkView


def pressure(link: LinkView, policy: RoutingPolicy) -> float:
    """How congested the egress is, 0 (not) to 1 (blocked): the worst of its signals."""
    if (
        not link.congested
        and link.utilisation <= policy.congested_utilisation
        and link.retransmit_ratio <= policy.congested_retransmits
        and link.drain_s <= policy.congested_drain_s
    ):
        return 0.0
    return min(
        1.0,
        max(
            0.0,
            _between(policy.congested_utilisation, link.utilisation, policy.blocked_utilisation),
            _between(policy.congested_drain_s, link.drain_s, policy.blocked_drain_s),
            _between(policy.congested_retransmits, link.retransmit_ratio, policy.blocked_retransmits),
            _between(policy.congested_rtt_inflation, link.rtt_inflation, policy.blocked_rtt_inflation)
            if link.congested
            else 0.0,
        ),
    )


def _between(low: float, value: float, high: float) -> float:
    return (value - low) / (high - low)


def is_scarce(link: LinkView, policy: RoutingPolicy) -> bool:
    """Whether prefixes should stay where they are. An unknown bandwidth is scarce: nothing speaks for spending it."""
    return (
        not link.rate_bytes_per_s
        or link.congested
        or link.utilisation >= policy.scarce_utilisation
        or link.drain_s >= policy.scarce_drain_s
    )
