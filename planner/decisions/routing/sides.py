"""One cluster as a place to prefill, and which of several remote ones is done first."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import msgspec

from planner.decisions.routing.arrivals import bytes_to_send
from planner.decisions.routing.lines import soonest_senders
from planner.decisions.routing.placement import longest_holder, soonest_s
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import ClusterKind, LinkView, NodeView, PrefillCost, RouteRequest


class ClusterWeighed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A cluster that could have prefilled. `why_not` is "" of the one that does.

    Else it is the reason for the other side; or `slower` than another cluster, `down`, `drained`, `cut_off` from the decode
    node, `no_node` that is ready. `delay_s` is when the KVCache would have been there; None: that was not asked. `lines` are
    those that it would have crossed, as far as they are described.
    """

    cluster: str
    why_not: str = ""
    delay_s: float | None = None
    lines: tuple[str, ...] = ()


class Side:
    """One cluster as a place to prefill: its prefill nodes, all holders of prefixes, its longest prefix, its egress."""

    __slots__ = ("_holders", "cluster", "decodes", "delay_s", "link", "lost", "prefill")

    def __init__(
        self, prefill: list[NodeView], decodes: list[NodeView], cluster: str, link: LinkView | None = None
    ) -> None:
        self.prefill = prefill
        self.decodes = decodes
        self.cluster = cluster
        self.link = link
        self.delay_s: float | None = None  # where it was compared with other clusters
        self.lost: tuple[ClusterWeighed, ...] = ()  # those
        self._holders: list[NodeView] | None = None

    def only(self, prefill: list[NodeView], link: LinkView) -> Self:
        """The same with fewer prefill nodes, over `link`; those left out still hand over prefixes."""
        side = type(self)(prefill, self.decodes, self.cluster, link)
        side._holders = self.holders() if len(prefill) < len(self.prefill) else None
        return side

    def holders(self) -> list[NodeView]:
        if self._holders is None:
            self._holders = self.prefill + [node for node in self.decodes if node.cluster == self.cluster]
        return self._holders

    def lenders(self, policy: RoutingPolicy) -> list[NodeView]:
        # Without transfers inside the cluster only the node that computes can use its prefix.
        return self.holders() if policy.placement.fetch_bytes_per_s else self.prefill

    def cached_tokens(self, policy: RoutingPolicy) -> int:
        """The longest prefix that a prefill here can begin with: its node's own, or one that its node is sent."""
        own = max([node.cached_tokens for node in self.prefill], default=0)
        return max(own, self.movable_tokens()) if policy.placement.fetch_bytes_per_s else own

    def movable_tokens(self) -> int:
        """The longest prefix that a node here can send to another one."""
        holder = longest_holder(self.holders())
        return holder.movable_tokens if holder is not None else 0

    def queue_s(self, cost: PrefillCost) -> float:
        return min(cost.queues_s(self.prefill))

    def soonest_s(self, request: RouteRequest, cost: PrefillCost) -> float:
        return soonest_s(request, self.prefill, cost)


def best_remote(
    request: RouteRequest,
    prefills: Mapping[str, list[NodeView]],
    decodes: list[NodeView],
    links: Iterable[LinkView],
    decode: NodeView,
    cost: PrefillCost,
) -> Side:
    """The PrfaaS cluster with a live link to the decode node's whose queue and egress are done first.

    A side without a link stands for PrfaaS nodes that cannot be reached; without nodes, for none being ready.
    """
    reachable: list[Side] = []
    lost: list[ClusterWeighed] = []
    for link in links:
        if link.destination != decode.cluster:
            continue
        nodes = able = prefills.get(link.source, [])
        if link.cut_off or link.lost:
            able = [node for node in nodes if link.carries(node.node_id, decode.node_id)]
        if not link.up or not able:
            lost.append(ClusterWeighed(cluster=link.source, why_not=_why_unreachable(link, nodes), lines=link.lines))
        elif able[0].kind is ClusterKind.PRFAAS:
            side = Side(able, decodes, link.source, link)
            own = soonest_senders(link, able, request, decode, cost) if link.senders else None
            reachable.append(side.only(*own) if own else side)
    best, slower = _soonest(request, reachable, decode, cost)
    if best is None:
        cut_off = next((nodes for nodes in prefills.values() if nodes[0].kind is ClusterKind.PRFAAS), [])
        best = Side(cut_off, decodes, cut_off[0].cluster if cut_off else "")
    best.lost = (*slower, *(each for each in lost if each.cluster != best.cluster))
    return best


def _soonest(
    request: RouteRequest, sides: Sequence[Side], decode: NodeView, cost: PrefillCost
) -> tuple[Side | None, list[ClusterWeighed]]:
    """The best of some clusters, and the others. One alone is not asked how soon it would be done."""
    if len(sides) < 2:
        return (sides[0] if sides else None), []
    delays_s = [remote_delay_s(request, side, decode, cost) for side in sides]
    chosen = delays_s.index(min(delays_s))
    sides[chosen].delay_s = delays_s[chosen]
    return sides[chosen], [
        ClusterWeighed(cluster=side.cluster, why_not="slower", delay_s=delay_s, lines=lines_of(side))
        for at, (side, delay_s) in enumerate(zip(sides, delays_s, strict=True))
        if at != chosen
    ]


def lines_of(side: Side) -> tuple[str, ...]:
    """Those that it sends over, as far as they are described."""
    return side.link.lines if side.link is not None else ()


def _why_unreachable(link: LinkView, nodes: Sequence[NodeView]) -> str:
    if link.drained:
        return "drained"
    if not link.up:
        return "down"
    return "cut_off" if nodes else "no_node"


def remote_delay_s(request: RouteRequest, side: Side, decode: NodeView, cost: PrefillCost) -> float:
    """When the KVCache of a prompt would have come from there."""
    assert side.link is not None
    # Layers leave while later ones are computed, so the slower of the two is seen (§3.4.1).
    return max(side.soonest_s(request, cost), side.link.arrives_s(bytes_to_send(request, decode)))
