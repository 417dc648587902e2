"""Builders of what routing sees, with defaults."""

from collections.abc import Collection, Iterable
from typing import Any

from planner.decisions.routing.offload import ReadyNodes, Route, route_among
from planner.decisions.routing.placement import PLACERS, Placer
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind, LinkView, NodeView, PrefillCost, Role, RouteRequest

GB = 10**9


def prfaas(node_id: str = "r0", **fields: Any) -> NodeView:
    defaults: dict[str, Any] = {"cluster": "east", "kind": ClusterKind.PRFAAS, "role": Role.PREFILL}
    return NodeView(node_id=node_id, **(defaults | fields))


def pd_prefill(node_id: str = "p0", **fields: Any) -> NodeView:
    defaults: dict[str, Any] = {"cluster": "west", "kind": ClusterKind.PD, "role": Role.PREFILL}
    return NodeView(node_id=node_id, **(defaults | fields))


def pd_decode(node_id: str = "d0", **fields: Any) -> NodeView:
    defaults: dict[str, Any] = {"cluster": "west", "kind": ClusterKind.PD, "role": Role.DECODE, "max_running": 20}
    return NodeView(node_id=node_id, **(defaults | fields))


def link(**fields: Any) -> LinkView:
    defaults: dict[str, Any] = {"source": "east", "destination": "west", "available_bytes_per_s": 12.5 * GB}
    return LinkView(**(defaults | fields))


def request(num_tokens: int, **fields: Any) -> RouteRequest:
    return RouteRequest(num_tokens=num_tokens, kv_bytes=fields.pop("kv_bytes", lambda n: 17_280.0 * n), **fields)


def policy(threshold_tokens: float = 20_000, **fields: Any) -> RoutingPolicy:
    return RoutingPolicy(threshold_tokens=threshold_tokens, **fields)


def route(
    asked: RouteRequest,
    nodes: Iterable[NodeView],
    links: Collection[LinkView],
    rules: RoutingPolicy,
    *,
    place: Placer = PLACERS["kvcache_centric"],
    cost: PrefillCost | None = None,
) -> Route:
    """The route among `nodes`; those that are not ready are left alone."""
    return route_among(ReadyNodes.among(nodes), asked, links, rules, place=place, cost=cost or PrefillCost())
