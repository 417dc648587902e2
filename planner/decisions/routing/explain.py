"""Explains a route: the decision itself, the prediction for every candidate, and the reason in words.

The route is `routing.route_among`'s, and a candidate's prediction is that of the same placement with this node as the only one to
place on. Nothing here decides anything.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from planner.decisions.routing.arrivals import sending_of
from planner.decisions.routing.congestion import is_scarce, pressure
from planner.decisions.routing.offload import (
    ReadyNodes,
    Reason,
    Route,
    Target,
    compared_tokens,
    is_fed,
    route_among,
    shares_cache,
)
from planner.decisions.routing.placement import Placer, PrefillChoice, choose_decode, has_memory
from planner.decisions.routing.policy import PlacementPolicy, RoutingPolicy
from planner.decisions.routing.sides import Side, best_remote
from planner.decisions.views import ClusterKind, LinkView, NodeView, PrefillCost, RouteRequest

SLOWEST: Final = 1e-9  # of two predictions that are as good as equal


class DecodeCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A ready decode node. `tbt_s` is the step predicted with this request in it, 0 while unknown."""

    node: str
    cluster: str
    is_chosen: bool
    running: int
    waiting: int
    max_running: int
    tbt_s: float
    cached_tokens: int
    attention_tokens: int
    room_tokens: int | None
    prefill_share: float
    why_not: str


class PrefillCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A ready prefill node, and what was predicted if it were to compute the prompt.

    `cached_tokens` are those it would begin with, moved from `fetch_from` where that is named. `ttft_s` is queue, move and
    compute, `arrives_s` when the KVCache would be over the link as well (0: it crosses none). `price_s` is what computing there
    costs those who come after, which placement adds. A node that cannot be reached has no predictions.
    """

    node: str
    cluster: str
    kind: ClusterKind
    is_chosen: bool
    why_not: str
    is_reachable: bool
    cached_tokens: int
    fetch_from: str | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0
    price_s: float = 0.0
    ttft_s: float = 0.0
    link_bytes: float = 0.0
    transfer_s: float = 0.0
    arrives_s: float = 0.0


class LinkWeighed(msgspec.Struct, frozen=True, kw_only=True):
    """A link as this decision saw it: `pressure` 0 to 1 raises the threshold, a scarce one carries no prefixes for others."""

    source: str
    destination: str
    up: bool
    rate_bytes_per_s: float | None
    utilisation: float
    backlog_s: float
    rtt_s: float
    retransmit_ratio: float
    pressure: float
    is_scarce: bool


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and what it was made from; `compared_tokens` is what was held against the policy's threshold."""

    route: Route
    words: str
    compared_tokens: int
    policy_threshold_tokens: float
    tie: float
    tie_share: float
    predicted_ttft_s: float
    predicted_tbt_s: float
    decodes: tuple[DecodeCandidate, ...]
    prefills: tuple[PrefillCandidate, ...]
    links: tuple[LinkWeighed, ...]


def explain_among(
    ready: ReadyNodes,
    request: RouteRequest,
    links: Collection[LinkView],
    policy: RoutingPolicy,
    *,
    place: Placer,
    cost: PrefillCost,
) -> Explanation:
    """`route_among`, and why. Raises NoReadyNode when no decode node is ready."""
    route = route_among(ready, request, links, policy, place=place, cost=cost)
    decode = next(node for node in ready.decodes if node.node_id == route.decode_node)
    local = Side(ready.prefills.get(decode.cluster, []), ready.decodes, decode.cluster)
    remote = best_remote(request, ready.prefills, ready.decodes, links, decode, cost)
    compared = compared_tokens(request, local, remote if shares_cache(remote.link, policy) else None, policy)
    words = _in_words(route, compared, request, local, remote, policy)
    prefills = _Prefills(route, request, decode, links, policy, place, cost, words)
    return Explanation(
        route=route,
        words=words,
        compared_tokens=compared,
        policy_threshold_tokens=policy.threshold_tokens,
        tie=request.tie,
        tie_share=policy.tie_share,
        predicted_ttft_s=max(route.ttft_s, route.arrives_s),
        predicted_tbt_s=cost.step_s(decode, decode.running + decode.waiting + 1),
        decodes=_decodes(route, request, ready, links, policy.placement, place, cost),
        prefills=prefills.among(ready, local, remote),
        links=tuple(_weighed(link, policy) for link in links),
    )


def _weighed(link: LinkView, policy: RoutingPolicy) -> LinkWeighed:
    return LinkWeighed(
        source=link.source,
        destination=link.destination,
        up=link.up,
        rate_bytes_per_s=link.rate_bytes_per_s,
        utilisation=link.utilisation,
        backlog_s=link.backlog_s,
        rtt_s=link.rtt_s,
        retransmit_ratio=link.retransmit_ratio,
        pressure=pressure(link, policy),
        is_scarce=is_scarce(link, policy),
    )


def _decodes(
    route: Route,
    request: RouteRequest,
    ready: ReadyNodes,
    links: Collection[LinkView],
    policy: PlacementPolicy,
    place: Placer,
    cost: PrefillCost,
) -> tuple[DecodeCandidate, ...]:
    nodes = ready.decodes
    chosen = next(node for node in nodes if node.node_id == route.decode_node)

    def step_s(node: NodeView) -> float:
        return cost.step_s(node, node.running + node.waiting + 1)

    def why_not(node: NodeView) -> str:
        if node is chosen:
            return ""
        if request.home and chosen.cluster == request.home != node.cluster:
            return f"its cluster is not {request.home}, where this gateway decodes"
        if not (node.prefills_alone or is_fed(node, ready, links)):
            return "it computes no prompts, and no prefill node is ready for it"
        if place.decode is not choose_decode:
            return f"this placement prefers {chosen.node_id}"
        if not has_memory(node, request) and has_memory(chosen, request):
            return f"memory for {node.room_tokens} more tokens of this prompt, and it needs more with its answer"
        if node.load >= 1 > chosen.load:
            return f"no place free: {node.running + node.waiting} of {node.max_running} taken"
        if (mine := step_s(node)) and (other := step_s(chosen)) and mine > other * (1.0 + policy.decode_load_slack):
            return f"its tokens would be slower: {_ms(mine)} each, {_ms(other)} on {chosen.node_id}"
        if node.due_tokens < chosen.due_tokens:
            coming = " and what is on its way to it" if chosen.landing_tokens > chosen.attention_tokens else ""
            return f"it holds {node.due_tokens} tokens of the prompt, {chosen.node_id} {chosen.due_tokens}{coming}"
        if node.load > chosen.load:
            return f"busier than {chosen.node_id}: {node.load:.0%} of its places, {chosen.load:.0%} there"
        return f"no better than {chosen.node_id}, which was found first"

    return tuple(
        DecodeCandidate(
            node=node.node_id,
            cluster=node.cluster,
            is_chosen=node is chosen,
            running=node.running,
            waiting=node.waiting,
            max_running=node.max_running,
            tbt_s=step_s(node),
            cached_tokens=node.cached_tokens,
            attention_tokens=node.attention_tokens,
            room_tokens=node.room_tokens,
            prefill_share=node.prefill_share,
            why_not=why_not(node),
        )
        for node in nodes
    )


class _Prefills:
    """Looks at every prefill node there is as if it were to compute the prompt."""

    def __init__(
        self,
        route: Route,
        request: RouteRequest,
        decode: NodeView,
        links: Collection[LinkView],
        policy: RoutingPolicy,
        place: Placer,
        cost: PrefillCost,
        words: str,
    ) -> None:
        self._route = route
        self._request = request
        self._decode = decode
        self._links = links
        self._policy = policy
        self._place = place
        self._cost = cost
        self._words = words

    def among(self, ready: ReadyNodes, local: Side, remote: Side) -> tuple[PrefillCandidate, ...]:
        found: list[PrefillCandidate] = []
        for cluster, nodes in ready.prefills.items():
            is_home = cluster == self._decode.cluster
            link = None if is_home else self._link_from(cluster)
            side = local if is_home else Side(nodes, ready.decodes, cluster, link)
            queues_s = self._cost.queues_s(nodes)
            price = self._policy.placement.compute_price(queues_s)
            for node in nodes:
                if (barrier := self._barrier(node, link)) and not is_home:
                    found.append(_unreachable(node, barrier))
                else:
                    found.append(self._candidate(node, side, price))
        chosen = next((each for each in found if each.is_chosen), None)
        return tuple(msgspec.structs.replace(each, why_not=self._why_not(each, chosen, remote)) for each in found)

    def _link_from(self, cluster: str) -> LinkView | None:
        return next((w for w in self._links if (w.source, w.destination) == (cluster, self._decode.cluster)), None)

    def _barrier(self, node: NodeView, link: LinkView | None) -> str:
        """The reason why the node cannot reach the decode node; empty: it can."""
        if node.kind is not ClusterKind.PRFAAS:
            return f"in another PD cluster than {self._decode.node_id}, which decodes"
        if link is None:
            return f"no link from {node.cluster} to {self._decode.cluster}"
        if link.drained:
            return f"the link from {node.cluster} to {self._decode.cluster} is drained: nothing new is to go over it"
        if not link.up:
            return f"the link from {node.cluster} to {self._decode.cluster} is down"
        if not link.carries(node.node_id, self._decode.node_id):
            return f"it does not reach {self._decode.node_id} over the link, though others do"
        return ""

    def _candidate(self, node: NodeView, side: Side, price: float) -> PrefillCandidate:
        request, route, cost = self._request, self._route, self._cost
        is_chosen = node.node_id == route.prefill_node
        choice = PrefillChoice(node, route.cached_tokens, route.ttft_s, route.fetch_from)
        if not is_chosen:  # of the chosen one the decision itself has told
            placement = self._policy.placement
            choice = self._place.prefill(request, [node], side.lenders(self._policy), placement, cost)
        compute_s = cost.prefill_s(node, request.num_tokens, choice.cached_tokens)
        link = side.link.of(node.node_id) if side.link is not None else None
        sending = sending_of(request, self._decode, link, choice.ttft_s, compute_s)
        return PrefillCandidate(
            node=node.node_id,
            cluster=node.cluster,
            kind=node.kind,
            is_chosen=is_chosen,
            why_not="",
            is_reachable=True,
            cached_tokens=choice.cached_tokens,
            fetch_from=choice.fetch_from,
            queue_s=cost.queue_s(node),
            compute_s=compute_s,
            price_s=price * compute_s,
            ttft_s=sending.ttft_s,
            link_bytes=sending.link_bytes,
            transfer_s=sending.link_s,
            arrives_s=sending.arrives_s if sending.link_bytes else 0.0,
        )

    def _why_not(self, node: PrefillCandidate, chosen: PrefillCandidate | None, remote: Side) -> str:
        if node.is_chosen or not node.is_reachable:
            return node.why_not
        if chosen is None:
            return f"nothing is handed over: {self._words}"
        if node.cluster == chosen.cluster:
            mine, best = node.ttft_s + node.price_s, chosen.ttft_s + chosen.price_s
            if mine > best + SLOWEST:
                return (
                    f"first token in {_seconds(mine)}, price of computing included; {chosen.node} in {_seconds(best)}"
                )
            if node.transfer_s > chosen.transfer_s + SLOWEST:
                mine_s, best_s = _seconds(node.transfer_s), _seconds(chosen.transfer_s)
                return f"its own line would have it there in {mine_s}, that of {chosen.node} in {best_s}"
            return f"no sooner than {chosen.node}"
        if chosen.kind is node.kind is ClusterKind.PRFAAS:
            return f"{chosen.cluster} is done sooner, its link included"
        if self._route.target is Target.LOCAL and node.cluster != remote.cluster:
            return f"{remote.cluster} would have been asked first, and {self._words}"
        return self._words


def _unreachable(node: NodeView, why_not: str) -> PrefillCandidate:
    return PrefillCandidate(
        node=node.node_id,
        cluster=node.cluster,
        kind=node.kind,
        is_chosen=False,
        why_not=why_not,
        is_reachable=False,
        cached_tokens=node.cached_tokens,
    )


# The reason of a route as a sentence; what stands in braces is filled in below.
WORDS: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        Reason.SHORT: "{compared} {what} are not above the threshold of {threshold}: prefill stays in {home}",
        Reason.LONG: "{compared} {what} are above the threshold of {raised}: prefill goes to {away}",
        Reason.REMOTE_PREFIX: "{compared} {what} would be above the threshold of {threshold} at home, "
        "but {away} has most of the prompt cached",
        Reason.CONGESTED: "{compared} {what} are above the threshold of {threshold}, "
        "but the link from {away} is busy or would be later than home: prefill stays in {home}",
        Reason.REMOTE_QUEUE: "{compared} {what} are above the threshold of {threshold}, "
        "but the queue of {away} is more than {remote_queue} longer than that of {home}",
        Reason.LINK_DOWN: "PrfaaS nodes are ready, but no link from them to {home} carries anything",
        Reason.NO_PRFAAS: "{compared} {what} are above the threshold of {threshold}, but no PrfaaS node is ready",
        Reason.NO_LOCAL_PREFILL: "{compared} {what} are not above the threshold of {threshold}, "
        "but {home} has no prefill node that is ready",
        Reason.NO_PREFILL: "no prefill node is ready anywhere: {decode} computes the prompt itself",
        Reason.SINGLE_TOKEN: "a prompt of one token has nothing to hand over: {decode} computes it",
        Reason.HELD: "{decode} holds {cached} tokens of the prompt and has computed the other {uncached} "
        "about as soon as anybody else would",
        Reason.UNSHARED: "KVCache that was computed elsewhere is of no use to this request: {decode} computes it whole",
    }
)

# The same, of a decode node that computes no prompts: what others do alone.
HANDED_OVER: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        Reason.SINGLE_TOKEN: "a prompt of one token is not worth a link, and {decode} computes none: {prefill} does",
        Reason.UNSHARED: "KVCache that is there is of no use to this request, and {decode} computes no prompts: "
        "{prefill} computes it whole",
    }
)

# A long prompt that the link's pressure would have kept at home, if home were sooner.
LATER_AT_HOME: Final = (
    "{compared} {what} are above the threshold of {threshold}, and the link from {away} is busy, "
    "but home would be later still: prefill goes to {away}"
)


def _in_words(
    route: Route, compared: int, request: RouteRequest, local: Side, remote: Side, policy: RoutingPolicy
) -> str:
    threshold = policy.threshold_tokens
    words = WORDS if route.prefill_node is None else {**WORDS, **HANDED_OVER}
    sentence = words[route.reason]
    if route.reason is Reason.LONG and compared <= route.threshold_tokens and threshold < route.threshold_tokens:
        sentence = LATER_AT_HOME
    told = sentence.format(
        compared=compared,
        what="tokens, cached or not," if policy.by_total_length else "tokens to compute at home",
        threshold=_tokens(threshold),
        raised=_tokens(threshold)
        if _tokens(route.threshold_tokens) == _tokens(threshold)
        else f"{_tokens(route.threshold_tokens)}, which the link's pressure has raised from {_tokens(threshold)}",
        home=local.cluster,
        away=remote.cluster or "a PrfaaS cluster",
        decode=route.decode_node,
        prefill=route.prefill_node,
        cached=route.cached_tokens,
        uncached=route.uncached_tokens,
        remote_queue=_seconds(policy.remote_queue_s),
    )
    if compared == threshold and route.reason in (Reason.SHORT, Reason.LONG):
        told += f" (just at it, {policy.tie_share:.0%} of such requests stay, and this one drew {request.tie:.2f})"
    if route.fetch_from is not None:
        told += f"; {route.fetch_from} hands over the first {route.cached_tokens} tokens"
    return told


def _tokens(number: float) -> str:
    return "infinity" if number == float("inf") else f"{number:.0f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else _ms(seconds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
