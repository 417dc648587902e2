"""The fourth room: where a request goes, a pure function of what is known of the clusters now."""

import hashlib
from collections.abc import Collection

from gateway.clusters import Clusters
from gateway.config import GatewayConfig
from gateway.errors import NodeError, Unavailable
from gateway.links import Links
from gateway.node import Node
from gateway.request import PrefillOutcome, Request
from planner.decisions.estimates import LearnedCost
from planner.decisions.placement import PLACERS, PlacementPolicy
from planner.decisions.routing import Route, RoutingPolicy, route
from planner.decisions.views import RouteRequest
from planner.errors import NoReadyNode


class Decider:
    """Asks the planner's rule, in this gateway's words and with its limits."""

    def __init__(self, config: GatewayConfig, clusters: Clusters, links: Links, cost: LearnedCost) -> None:
        self._clusters = clusters
        self._links = links
        self._cost = cost
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Decides as `config` says from now on."""
        self._home = config.routing.home_cluster or None
        self._policy = RoutingPolicy(
            threshold_tokens=config.threshold_tokens,
            cross_cluster_cache=config.routing.cross_cluster_cache,
            placement=PlacementPolicy(fetch_bytes_per_s=config.routing.fetch_bytes_per_s),
        )
        self._place = PLACERS[config.routing.placement]
        self._cost.assume(config.routing.prefill_tokens_per_s)

    def route(self, request: Request, exclude: Collection[str] = (), home: str | None = None) -> Route:
        """Where `request` goes now, leaving the nodes of `exclude` out. Raises Unavailable."""
        question = RouteRequest(
            num_tokens=request.prompt.num_tokens,
            kv_bytes=request.served.layout.kv_bytes,
            tie=_tie(request.leg_id),
            home=home or self._home,
            unshared=request.call.options.is_unshared,
        )
        nodes, links = self._clusters.views(request.prompt, exclude), self._links.views()
        try:
            return route(question, nodes, links, self._policy, place=self._place, cost=self._cost)
        except NoReadyNode as error:
            raise Unavailable("No decode node is ready.", "no_decode_node") from error

    def learn(self, node: Node, outcome: PrefillOutcome) -> None:
        """`node` has computed a prompt."""
        computed, seconds = outcome.num_tokens - outcome.cached_tokens, outcome.prefill_end_s - outcome.prefill_start_s
        self._cost.observe(node.id, node.cluster, computed, outcome.cached_tokens, seconds)

    def other_prefill(self, request: Request, chosen: Route, failed: Collection[str]) -> Route | None:
        """A route by another prefill node to the decode cluster of `chosen`, None if there is none."""
        try:
            home = self._clusters.by_id(chosen.decode_node).cluster
            other = self.route(request, failed, home)
        except (Unavailable, NodeError):
            return None
        return other if other.prefill_node is not None else None


def _tie(request_id: str) -> float:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=4).digest()) / 2**32
