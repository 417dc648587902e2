"""The Pareto front of cost, rate and P90 TTFT, as text and as JSON."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from planner.commands.rendering.purchases import NAMES
from planner.commands.rendering.text import tokens
from planner.model.market import Market
from planner.solve.buying.pareto import FrontPoint


def front_json(market: Market, front: Sequence[FrontPoint]) -> list[dict[str, Any]]:
    """A row for each system, units in the keys."""
    return [
        {
            "busiest_hour_req_per_s": point.rate_req_per_s,
            "ttft_p90_s": point.ttft_p90_s,
            "cost_per_month": point.cost_per_month,
            "contender": str(point.system.contender),
            "num_prfaas": point.system.num_prfaas,
            "num_prefill": point.system.num_prefill,
            "num_decode": point.system.num_decode,
            "threshold_tokens": point.system.threshold_tokens if isfinite(point.system.threshold_tokens) else None,
            "line": market.line_number(point.system.line) if point.system.line else None,
            "line_gbps": point.system.line.gbps if point.system.line else 0.0,
        }
        for point in front
    ]


def front_text(market: Market, front: Sequence[FrontPoint]) -> str:
    """A table: none of its systems is beaten in cost, rate and P90 TTFT at once."""
    head = f"  {'TTFT P90, s':>11}{'req/s':>8}{'a month, ' + market.currency:>14}{'PrfaaS':>8}{'PD-P':>6}{'PD-D':>6}"
    rows = [
        f"  {point.ttft_p90_s:>11.2f}{point.rate_req_per_s:>8.2f}{point.cost_per_month:>14,.0f}"
        f"{point.system.num_prfaas:>8}{point.system.num_prefill:>6}{point.system.num_decode:>6}"
        f"{tokens(point.system.threshold_tokens) if point.system.num_prfaas else '-':>9}"
        f"{point.system.line.gbps if point.system.line else 0:>8g}  {NAMES[point.system.contender]}"
        for point in front
    ]
    title = "Pareto front: no other system is as cheap, carries as much and is as early"
    return "\n".join([title, f"{head}{'t':>9}{'Gbit/s':>8}  way", *rows])
