"""Local or remote: the short timescale of PrfaaS (§3.4.3), one pure function.

    scarce bandwidth     local iff l_total − l_pd ≤ t                     each cluster's cache on its own
    abundant bandwidth   local iff l_total − max(l_prfaas, l_pd) ≤ t      the longer prefix is sent where needed
    congested egress     the threshold rises with the pressure, until nothing goes remote that is sooner done at home

The second row needs prefix transfers between clusters; a policy without them always uses the first.

A decode node that cannot compute prompts (`NodeView.prefills_alone`) is chosen only where a node prefills for it: at home,
or else over a link, what another one would do alone.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Self

import msgspec
from msgspec import structs

from planner.decisions.routing.arrivals import bytes_to_send, sending_of
from planner.decisions.routing.congestion import is_scarce, pressure
from planner.decisions.routing.placement import (
    Placer,
    PrefillChoice,
    longest_holder,
)
from planner.decisions.routing.policy import PlacementPolicy, RoutingPolicy
from planner.decisions.routing.sides import ClusterWeighed, Side, best_remote, lines_of, remote_delay_s
from planner.decisions.views import ClusterKind, LinkView, NodeView, PrefillCost, Role, RouteRequest
from planner.errors import NobodyPrefills, NoReadyNode


class Target(StrEnum):
    """Where the prefill happens."""

    LOCAL = "local"
    REMOTE = "remote"
    DECODE = "decode"  # on the decode node itself, nothing travels: never one that cannot

    __hash__ = str.__hash__  # Enum's own is slow, and every route is counted


class Reason(StrEnum):
    """The reason for a route; it also labels the counter of routes."""

    SHORT = "short"  # uncached ≤ t
    LONG = "long"  # uncached > t
    REMOTE_PREFIX = "remote_prefix"  # above t at home, but PrfaaS has most of it cached: there it is at most t
    CONGESTED = "congested"  # above t, below the threshold that the egress pressure left
    REMOTE_QUEUE = "remote_queue"  # above t, but PrfaaS queues surge
    LINK_DOWN = "link_down"  # PrfaaS nodes are ready, but no link from them to the PD cluster is up
    NO_PRFAAS = "no_prfaas"  # above t, but no PrfaaS node is ready
    NO_LOCAL_PREFILL = "no_local_prefill"  # at most t, but no PD prefill node is ready
    NO_PREFILL = "no_prefill"  # no node prefills but the decode node
    SINGLE_TOKEN = "single_token"  # nothing worth a link: the decode side computes the last token anyway, if it can
    HELD = "held"  # the decode node holds nearly all of it and has computed the rest before anybody else
    UNSHARED = (
        "unshared"  # KVCache that is there is of no use: the decode side, or who prefills for it, computes it whole
    )

    __hash__ = str.__hash__


class ReadyNodes(msgspec.Struct, frozen=True, gc=False):
    """The nodes that may be chosen: prefill nodes by cluster, and all decode nodes. No list is empty but, maybe, `decodes`."""

    prefills: Mapping[str, list[NodeView]]
    decodes: list[NodeView]

    @classmethod
    def among(cls, nodes: Iterable[NodeView]) -> Self:
        decodes: list[NodeView] = []
        prefills: dict[str, list[NodeView]] = {}
        for node in nodes:
            if not node.ready:
                continue
            if node.role is Role.DECODE:
                decodes.append(node)
            elif node.cluster in prefills:
                prefills[node.cluster].append(node)
            else:
                prefills[node.cluster] = [node]
        return cls(prefills, decodes)


class Route(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The decision. `[0, cached_tokens)` need not be computed; `fetch_from` names the node that hands it over first.

    `prefill_node` is None when the decode node does everything. `threshold_tokens` is the one that applied, pressure
    included; `ttft_s` is the placement's prediction without the link; `compute_s` its computing part. `link_bytes` will
    cross a link, and `coded_bytes` is their predicted size after coding. `link_s` is when they will have crossed,
    behind everything queued before. By `fetch_limit_s` the prefill node would have computed what it is handed; the
    decode node has `held_tokens`, and, where `shared_tokens` are not 0, so many in `shared_s`: those are waited for,
    and not sent again. `considered` are the clusters that could have prefilled, where that was a question.
    """

    target: Target
    reason: Reason
    decode_node: str
    prefill_node: str | None
    uncached_tokens: int
    cached_tokens: int
    threshold_tokens: float
    ttft_s: float = 0.0
    compute_s: float = 0.0
    link_bytes: float = 0.0
    link_s: float = 0.0
    coded_bytes: float = 0.0
    fetch_from: str | None = None
    fetch_limit_s: float = 0.0
    held_tokens: int = 0
    shared_tokens: int = 0
    shared_s: float = 0.0
    considered: tuple[ClusterWeighed, ...] = ()

    @property
    def arrives_s(self) -> float:
        """When its KVCache will have crossed the link; 0 where it crosses none. Layers leave while later ones are computed."""
        return max(self.ttft_s, self.link_s) if self.link_bytes else 0.0

    def __str__(self) -> str:
        return (
            f"{self.target} uncached={self.uncached_tokens} threshold={self.threshold_tokens:.0f} reason={self.reason}"
            f" prefill={self.prefill_node} decode={self.decode_node}"
        )


def route_among(
    ready: ReadyNodes,
    request: RouteRequest,
    links: Collection[LinkView],
    policy: RoutingPolicy,
    *,
    place: Placer,
    cost: PrefillCost,
) -> Route:
    """Where to prefill and decode `request`. Callers keep `ready` from one request to the next.

    A PrfaaS cluster is reachable only through a `LinkView` in `links` that is up. A request whose prompt is one token, or for
    which no prefill node is ready, is left to the decode node alone, if it can.
    Raises NoReadyNode when no decode node is ready, NobodyPrefills when those that are need a prefill node that is ready.
    """
    decodes = ready.decodes
    if not decodes:
        raise NoReadyNode("no decode node is ready")
    able = [node for node in decodes if node.prefills_alone or is_fed(node, ready, links)]
    if not able:
        raise NobodyPrefills("no prefill node is ready for a decode node that computes no prompts")
    at_home = [node for node in able if node.cluster == request.home] if request.home else []
    decode = place.decode(request, at_home or able, policy.placement, cost)
    chosen = _route_to(decode, ready, request, links, policy, place, cost)
    if chosen.reason is Reason.LINK_DOWN and (others := _others_reached(decode, ready, links)):
        reached = place.decode(request, others, policy.placement, cost)
        other = _route_to(reached, ready, request, links, policy, place, cost)
        return other if other.target is Target.REMOTE else chosen
    return chosen


def is_fed(decode: NodeView, ready: ReadyNodes, links: Collection[LinkView]) -> bool:
    """Whether some prefill node gets KVCache to this decode node, from its own cluster or over a link."""
    return bool(ready.prefills.get(decode.cluster)) or any(
        node.kind is ClusterKind.PRFAAS and link.carries(node.node_id, decode.node_id)
        for link in links
        if link.up and link.destination == decode.cluster
        for node in ready.prefills.get(link.source, ())
    )


def _others_reached(decode: NodeView, ready: ReadyNodes, links: Collection[LinkView]) -> list[NodeView]:
    """Decode nodes of the same cluster with a place free that some PrfaaS node does reach."""
    ways = [link for link in links if link.up and link.lost and link.destination == decode.cluster]
    return [
        node
        for node in ready.decodes
        if node.cluster == decode.cluster
        and node.load < 1
        and any(way.carries(each.node_id, node.node_id) for way in ways for each in ready.prefills.get(way.source, ()))
    ]


def _route_to(
    decode: NodeView,
    ready: ReadyNodes,
    request: RouteRequest,
    links: Collection[LinkView],
    policy: RoutingPolicy,
    place: Placer,
    cost: PrefillCost,
) -> Route:
    prefills, decodes = ready.prefills, ready.decodes
    local = Side(prefills.get(decode.cluster, []), decodes, decode.cluster)
    if request.unshared or request.num_tokens <= 1:
        reason = Reason.UNSHARED if request.unshared else Reason.SINGLE_TOKEN
        if not decode.prefills_alone:
            side = local if local.prefill else best_remote(request, prefills, decodes, links, decode, cost)
            return _handed_over(request, decode, side, reason, policy, place, cost)
        return _on_decode_node(request, decode, reason, policy, cost)
    remote = best_remote(request, prefills, decodes, links, decode, cost)
    if not local.prefill and not (remote.prefill and remote.link):
        reason = Reason.LINK_DOWN if remote.prefill else Reason.NO_PREFILL
        return _on_decode_node(request, decode, reason, policy, cost)

    verdict = _decide(request, local, remote, decode, policy, cost)
    side, other = (local, remote) if verdict.target is Target.LOCAL else (remote, local)
    choice = place.prefill(request, side.prefill, side.lenders(policy), policy.placement, cost)
    if verdict.shares_cache:
        choice = _with_other_cluster(request, choice, other, policy.placement, cost)
    if _is_short_increment(request, decode, policy):
        held = _on_decode_node(request, decode, Reason.HELD, policy, cost)
        if held.ttft_s <= policy.increment_patience * _seen_s(
            request, choice, decode, remote if side is remote else None
        ):
            return held
    reason = verdict.reason
    if reason is Reason.LONG and request.num_tokens - choice.cached_tokens <= policy.threshold_tokens:
        # A tie that was drawn to go away is at the threshold everywhere.
        reason = Reason.REMOTE_PREFIX if choice.cached_tokens > local.cached_tokens(policy) else reason
    compute_s = cost.prefill_s(choice.node, request.num_tokens, choice.cached_tokens)
    sending = sending_of(request, decode, remote.link if side is remote else None, choice.ttft_s, compute_s)
    return Route(
        target=verdict.target,
        reason=reason,
        decode_node=decode.node_id,
        prefill_node=choice.node.node_id,
        uncached_tokens=request.num_tokens - choice.cached_tokens,
        cached_tokens=choice.cached_tokens,
        threshold_tokens=verdict.threshold_tokens,
        ttft_s=sending.ttft_s,
        compute_s=compute_s,
        link_bytes=sending.link_bytes,
        link_s=sending.link_s,
        coded_bytes=sending.coded_bytes,
        fetch_from=choice.fetch_from,
        fetch_limit_s=choice.fetch_limit_s,
        held_tokens=decode.attention_tokens,
        shared_tokens=sending.shared_tokens,
        shared_s=sending.shared_s,
        considered=_considered(decode.cluster, local, remote, verdict.target, reason),
    )


def _considered(home: str, local: Side, remote: Side, target: Target, reason: Reason) -> tuple[ClusterWeighed, ...]:
    """Both sides, and the remote clusters that lost to the best of them."""
    is_local = target is Target.LOCAL
    lost_at_home = str(reason) if local.prefill else "no_node"
    at_home = ClusterWeighed(cluster=home, why_not="" if is_local else lost_at_home)
    if not remote.prefill:
        return (at_home, *remote.lost)
    best = ClusterWeighed(
        cluster=remote.cluster,
        why_not=str(reason) if is_local else "",
        delay_s=remote.delay_s,
        lines=lines_of(remote),
    )
    return (at_home, best, *remote.lost)


def _is_short_increment(request: RouteRequest, decode: NodeView, policy: RoutingPolicy) -> bool:
    return (
        decode.prefills_alone
        and 0 < request.num_tokens - decode.cached_tokens <= policy.increment_tokens
        and decode.cached_tokens > 0
        and decode.prefill_share < policy.decode_prefill_share
    )


def _seen_s(request: RouteRequest, choice: PrefillChoice, decode: NodeView, remote: "Side | None") -> float:
    """The TTFT predicted for a choice, its way over a link included."""
    if remote is None or remote.link is None:
        return choice.ttft_s
    return max(choice.ttft_s, remote.link.arrives_s(bytes_to_send(request, decode)))


class _Verdict(msgspec.Struct, frozen=True, gc=False):
    target: Target
    reason: Reason
    threshold_tokens: float
    shares_cache: bool = False


def shares_cache(link: LinkView | None, policy: RoutingPolicy) -> bool:
    """Whether a prefix may cross the link now: it is known to have room to spare."""
    return policy.cross_cluster_cache and link is not None and not is_scarce(link, policy)


def compared_tokens(request: RouteRequest, local: Side, lender: Side | None, policy: RoutingPolicy) -> int:
    """The length to compare with the threshold: the tokens to compute at home, less what a `lender` could send
    there."""
    if policy.by_total_length:
        return request.num_tokens
    l_pd = local.cached_tokens(policy)
    return request.num_tokens - (max(lender.movable_tokens(), l_pd) if lender is not None else l_pd)


def _decide(
    request: RouteRequest, local: Side, remote: Side, decode: NodeView, policy: RoutingPolicy, cost: PrefillCost
) -> _Verdict:
    threshold = policy.threshold_tokens
    link = remote.link
    shares = shares_cache(link, policy)
    uncached = compared_tokens(request, local, remote if shares else None, policy)
    if _stays(uncached, threshold, request, policy):
        if local.prefill:
            return _Verdict(Target.LOCAL, Reason.SHORT, threshold, shares)
        return _Verdict(Target.REMOTE, Reason.NO_LOCAL_PREFILL, threshold, shares)
    if not remote.prefill:
        return _Verdict(Target.LOCAL, Reason.NO_PRFAAS, threshold)
    if not local.prefill:
        return _Verdict(Target.REMOTE, Reason.LONG, threshold, shares)
    if link is None:
        return _Verdict(Target.LOCAL, Reason.LINK_DOWN, threshold)
    home_s = local.soonest_s(request, cost)
    # A link on which this prompt would come later than from home is full for it, before there is a queue as well.
    strain = 1.0 if link.sent_s(bytes_to_send(request, decode)) > home_s else pressure(link, policy)
    raised = threshold * policy.congestion_factor**strain if strain < 1 else float("inf")
    # Giving way must help: prefill at home may be the busier of the two.
    if strain and uncached <= raised and home_s <= remote_delay_s(request, remote, decode, cost):
        return _Verdict(Target.LOCAL, Reason.CONGESTED, raised)
    remote_queue_s = remote.queue_s(cost)
    if remote_queue_s > policy.remote_queue_s and remote_queue_s > local.queue_s(cost) + policy.remote_queue_s:
        return _Verdict(Target.LOCAL, Reason.REMOTE_QUEUE, raised)
    return _Verdict(Target.REMOTE, Reason.LONG, raised, shares)


def _stays(uncached: int, threshold: float, request: RouteRequest, policy: RoutingPolicy) -> bool:
    if uncached == threshold:
        return request.tie < policy.tie_share
    return uncached < threshold


def _with_other_cluster(
    request: RouteRequest, choice: PrefillChoice, other: Side, policy: PlacementPolicy, cost: PrefillCost
) -> PrefillChoice:
    """`choice`, but with the longer prefix of the other cluster, if it has one that can be hoped to arrive."""
    holder = longest_holder(other.holders())
    if holder is None or holder.movable_tokens <= choice.cached_tokens:
        return choice
    compute_s = cost.prefill_s(choice.node, request.num_tokens, holder.movable_tokens)
    saved_s = cost.prefill_s(choice.node, request.num_tokens, choice.cached_tokens) - compute_s
    if policy.fetch_delay_s(holder, choice.node) > saved_s:
        return choice
    ttft_s = choice.ttft_s - saved_s
    return PrefillChoice(choice.node, holder.movable_tokens, ttft_s, holder.node_id, choice.ttft_s - compute_s)


def _handed_over(
    request: RouteRequest,
    decode: NodeView,
    side: Side,
    reason: Reason,
    policy: RoutingPolicy,
    place: Placer,
    cost: PrefillCost,
) -> Route:
    """What a decode node would do alone if it could, by a prefill node of `side`: no prefix is sent there for it."""
    choice = place.prefill(request, side.prefill, side.prefill, replace(policy.placement, fetch_bytes_per_s=0.0), cost)
    cached = 0 if request.unshared else choice.cached_tokens
    compute_s = cost.prefill_s(choice.node, request.num_tokens, cached)
    alone = structs.replace(decode, landing_tokens=0)  # such a prompt shares nothing
    sending = sending_of(request, alone, side.link, cost.queue_s(choice.node) + compute_s, compute_s)
    return Route(
        target=Target.REMOTE if side.link else Target.LOCAL,
        reason=reason,
        decode_node=decode.node_id,
        prefill_node=choice.node.node_id,
        uncached_tokens=request.num_tokens - cached,
        cached_tokens=cached,
        threshold_tokens=policy.threshold_tokens,
        ttft_s=sending.ttft_s,
        compute_s=compute_s,
        link_bytes=sending.link_bytes,
        link_s=sending.link_s,
        coded_bytes=sending.coded_bytes,
        held_tokens=decode.attention_tokens,
    )


def _on_decode_node(
    request: RouteRequest, decode: NodeView, reason: Reason, policy: RoutingPolicy, cost: PrefillCost
) -> Route:
    cached = 0 if request.unshared else decode.cached_tokens
    compute_s = cost.prefill_s(decode, request.num_tokens, cached)
    return Route(
        target=Target.DECODE,
        reason=reason,
        decode_node=decode.node_id,
        prefill_node=None,
        uncached_tokens=request.num_tokens - cached,
        cached_tokens=cached,
        threshold_tokens=policy.threshold_tokens,
        ttft_s=cost.queue_s(decode) + compute_s,
        compute_s=compute_s,
        held_tokens=decode.attention_tokens,
    )
