"""Which revision of a model serves a request, while a fleet goes from one to the next: one pure function.

Nodes of two revisions cannot use each other's KVCache, so a request needs all its roles in one of them. A revision's weight is
its share of the nodes of the scarcer role. The request's own number draws one by weight. A revision that has more of the
prompt cached is taken instead, if it is predicted to begin the answer sooner.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec.structs import replace

from planner.decisions.routing.offload import ReadyNodes, Route, is_fed, route_among
from planner.decisions.routing.placement import Placer
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind, LinkView, NodeView, PrefillCost, RouteRequest
from planner.errors import NobodyPrefills, NoReadyNode


class NeededRole(StrEnum):
    """A role that a request may need nodes of, all in one revision."""

    DECODE = "decode"
    LOCAL = "local prefill"
    REMOTE = "remote prefill"
    PREFILL = "prefill"  # of whichever kind


Sizes = Mapping[str, Callable[[int], float]]  # S_kv of each revision

ONE_SIZE: Final[Sizes] = MappingProxyType({})
ALONE: Final = (NeededRole.DECODE,)
ANY: Final = (NeededRole.DECODE, NeededRole.PREFILL)


class RevisionWeighed(msgspec.Struct, frozen=True, kw_only=True):
    """A revision as one choice saw it. Of one with a `share` of 0 nothing was predicted."""

    revision: str
    is_chosen: bool
    share: float
    cached_tokens: int = 0
    ttft_s: float = 0.0


class RevisionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The revision chosen, the roles that counted, and all revisions by name. `is_held`: for the sake of its prefix."""

    revision: str
    roles: tuple[NeededRole, ...]
    is_held: bool
    weighed: tuple[RevisionWeighed, ...]


def choose_revision(
    revisions: Mapping[str, ReadyNodes],
    request: RouteRequest,
    links: Collection[LinkView],
    policy: RoutingPolicy,
    *,
    draw: float,
    place: Placer,
    cost: PrefillCost,
    sizes: Sizes = ONE_SIZE,
) -> RevisionChoice:
    """The revision that serves `request`, by its number `draw` in [0, 1). Its KVCache has another size in those of `sizes`.

    Raises NoReadyNode when none has a ready decode node, NobodyPrefills when those that have need a prefill node.
    """
    able = {name: ready for name, ready in revisions.items() if _able(ready, links)}
    if not able:
        if any(ready.decodes for ready in revisions.values()):
            raise NobodyPrefills("no revision has a prefill node ready for its decode nodes, which compute no prompts")
        raise NoReadyNode("no revision has a decode node that is ready")
    roles, shares = _shares_by_need(able, request, links, policy)
    drawn = drawn_by(shares, draw)
    routes = {
        name: route_among(
            able[name],
            replace(request, kv_bytes=sizes.get(name, request.kv_bytes)),
            links,
            policy,
            place=place,
            cost=cost,
        )
        for name, share in shares.items()
        if share > 0
    }
    chosen = _sooner(drawn, routes)
    weighed = tuple(_weighed(name, chosen, shares.get(name, 0.0), routes.get(name)) for name in sorted(revisions))
    return RevisionChoice(revision=chosen, roles=roles, is_held=chosen != drawn, weighed=weighed)


def drawn_by(shares: Mapping[str, float], draw: float) -> str:
    """The name that the number `draw` in [0, 1) falls on; some share is above 0, and no other is ever drawn."""
    names = [name for name in sorted(shares) if shares[name] > 0]
    left = draw * sum(shares[name] for name in names)
    for name in names[:-1]:
        left -= shares[name]
        if left < 0:
            return name
    return names[-1]


def scarcer_shares(
    revisions: Mapping[str, ReadyNodes], roles: Sequence[NeededRole], links: Collection[LinkView]
) -> dict[str, float]:
    """Of each revision, its smallest share among the ready nodes of `roles`. All are 0 if no revision has all roles."""
    counts = {name: _counts(ready, links) for name, ready in revisions.items()}
    totals = {role: sum(count[role] for count in counts.values()) for role in roles}
    return {
        name: min(count[role] / totals[role] if totals[role] else 0.0 for role in roles)
        for name, count in counts.items()
    }


def _shares_by_need(
    able: Mapping[str, ReadyNodes], request: RouteRequest, links: Collection[LinkView], policy: RoutingPolicy
) -> tuple[tuple[NeededRole, ...], dict[str, float]]:
    """The first of what the request would like that some revision has whole: at the least decode alone, which all have."""
    for roles in (_wanted(able, request, links, policy), ANY, ALONE):
        shares = scarcer_shares(able, roles, links)
        if any(shares.values()):
            return roles, shares
    raise AssertionError("every revision that is able has a decode node")


def _wanted(
    able: Mapping[str, ReadyNodes], request: RouteRequest, links: Collection[LinkView], policy: RoutingPolicy
) -> tuple[NeededRole, ...]:
    counts = [_counts(ready, links) for ready in able.values()]
    has_remote, has_local = (any(count[role] for count in counts) for role in (NeededRole.REMOTE, NeededRole.LOCAL))
    if request.unshared or request.num_tokens <= 1:
        everyone_alone = all(node.prefills_alone for ready in able.values() for node in ready.decodes)
        return ALONE if everyone_alone else ANY
    if not (has_remote and has_local):
        return ANY if has_remote or has_local else ALONE
    is_long = request.num_tokens - _cached_tokens(able) > policy.threshold_tokens
    return (NeededRole.DECODE, NeededRole.REMOTE if is_long else NeededRole.LOCAL)


def _cached_tokens(able: Mapping[str, ReadyNodes]) -> int:
    """The longest prefix that a node at home has, in any revision."""
    homes = [node for ready in able.values() for node in (*ready.decodes, *_local(ready))]
    return max((node.cached_tokens for node in homes), default=0)


def _able(ready: ReadyNodes, links: Collection[LinkView]) -> bool:
    return any(node.prefills_alone or is_fed(node, ready, links) for node in ready.decodes)


def _counts(ready: ReadyNodes, links: Collection[LinkView]) -> dict[NeededRole, int]:
    local, remote = len(_local(ready)), len(_remote(ready, links))
    return {
        NeededRole.DECODE: sum(node.prefills_alone or is_fed(node, ready, links) for node in ready.decodes),
        NeededRole.LOCAL: local,
        NeededRole.REMOTE: remote,
        NeededRole.PREFILL: local + remote,
    }


def _local(ready: ReadyNodes) -> list[NodeView]:
    """Prefill nodes beside a decode node of their revision."""
    homes = {node.cluster for node in ready.decodes}
    return [node for cluster in homes for node in ready.prefills.get(cluster, ())]


def _remote(ready: ReadyNodes, links: Collection[LinkView]) -> list[NodeView]:
    """PrfaaS nodes whose KVCache gets to a decode node of their revision."""
    ways = [(link, node) for link in links if link.up for node in ready.decodes if node.cluster == link.destination]
    return [
        node
        for cluster, nodes in ready.prefills.items()
        for node in nodes
        if node.kind is ClusterKind.PRFAAS
        and any(link.source == cluster and link.carries(node.node_id, decode.node_id) for link, decode in ways)
    ]


def _sooner(drawn: str, routes: Mapping[str, Route]) -> str:
    """The drawn revision, or the one with more of the prompt cached that begins to answer sooner."""
    own = routes[drawn]
    better = [
        (_seen_s(route), name)
        for name, route in routes.items()
        if route.cached_tokens > own.cached_tokens and _seen_s(route) < _seen_s(own)
    ]
    return min(better)[1] if better else drawn


def _weighed(name: str, chosen: str, share: float, route: Route | None) -> RevisionWeighed:
    if route is None:
        return RevisionWeighed(revision=name, is_chosen=name == chosen, share=share)
    return RevisionWeighed(
        revision=name,
        is_chosen=name == chosen,
        share=share,
        cached_tokens=route.cached_tokens,
        ttft_s=_seen_s(route),
    )


def _seen_s(route: Route) -> float:
    return max(route.ttft_s, route.link_s)
