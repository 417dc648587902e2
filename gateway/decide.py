"""The fourth room: where a request goes, a pure function of what is known of the clusters now."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace

from gateway.clusters import Clusters
from gateway.config import GatewayConfig
from gateway.errors import NodeError, Unavailable
from gateway.links import Links
from gateway.moves import Move
from gateway.node import Node
from gateway.request import PrefillOutcome, Request
from planner.decisions.estimates import LearnedCost, MoveDelays, MoveEstimate
from planner.decisions.placement import PLACERS, PlacementPolicy
from planner.decisions.routing import Route, RoutingPolicy, route
from planner.decisions.views import RouteRequest
from planner.errors import NoReadyNode


class Decider:
    """Asks the planner's rule, in this gateway's words and with its limits."""

    def __init__(
        self, config: GatewayConfig, clusters: Clusters, links: Links, cost: LearnedCost, clock: Callable[[], float]
    ) -> None:
        self._clusters = clusters
        self._clock = clock
        self._links = links
        self._cost = cost
        self._fetch_bytes_per_s = 0.0
        self._moves: MoveEstimate | None = None
        self._delays = MoveDelays()
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Decides as `config` says from now on. What was learned of moves begins anew with another rate for them."""
        routing = config.routing
        self._home = routing.home_cluster or None
        if routing.fetch_bytes_per_s != self._fetch_bytes_per_s:
            self._fetch_bytes_per_s = routing.fetch_bytes_per_s
            self._moves = MoveEstimate(routing.fetch_bytes_per_s) if routing.fetch_bytes_per_s else None
        self._policy = RoutingPolicy(
            threshold_tokens=config.threshold_tokens,
            cross_cluster_cache=routing.cross_cluster_cache,
            increment_tokens=routing.increment_tokens,
            decode_prefill_share=routing.decode_prefill_share,
            placement=self._placement(),
        )
        self._place = PLACERS[routing.placement]
        self._cost.assume(routing.prefill_tokens_per_s)

    def _placement(self) -> PlacementPolicy:
        if self._moves is None:
            return PlacementPolicy()
        return PlacementPolicy(fetch_bytes_per_s=self._moves.bytes_per_s, fetch_calls_s=self._moves.calls_s)

    def _policy_now(self) -> RoutingPolicy:
        """The policy, and in it which moves are feared to be late."""
        if not self._delays:
            return self._policy
        placement = replace(self._policy.placement, fetch_delays_s=self._delays.at(self._clock()))
        return replace(self._policy, placement=placement)

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
            return route(question, nodes, links, self._policy_now(), place=self._place, cost=self._cost)
        except NoReadyNode as error:
            raise Unavailable("No decode node is ready.", "no_decode_node") from error

    def may_compute(self, decode_node: str) -> bool:
        """Whether a decode node has time for a prompt that a prefill node should have computed."""
        try:
            share = self._clusters.by_id(decode_node).prefill_share.at(self._clock())
        except NodeError:
            return True  # it is another one by now, and will say so
        return share < self._policy.decode_prefill_share

    def learn(self, node: Node, outcome: PrefillOutcome) -> None:
        """`node` has computed a prompt."""
        computed, seconds = outcome.num_tokens - outcome.cached_tokens, outcome.prefill_end_s - outcome.prefill_start_s
        self._cost.observe(node.id, node.cluster, computed, outcome.cached_tokens, seconds)

    def learn_move(self, move: Move, sent: int, seconds: float) -> None:
        """A prefix has moved; what it took says what the next one takes, inside a cluster."""
        self._delays.arrived(move.source.id, move.target.id)
        if self._moves is not None and move.source.cluster == move.target.cluster:
            self._moves.observe(sent, seconds)
            self._policy = replace(self._policy, placement=self._placement())

    def learn_late_move(self, move: Move, seconds: float) -> None:
        """A prefix has not moved; for some time the next one between the two nodes is expected to be late."""
        expected_s = self._moves.seconds(move.num_bytes) if self._moves is not None else 0.0
        self._delays.failed(move.source.id, move.target.id, expected_s, seconds, self._clock())
        self._delays.keep({node.id for node in self._clusters.nodes})

    def other_prefill(self, request: Request, chosen: Route, failed: Collection[str]) -> Route | None:
        """A route by another prefill node to the decode cluster of `chosen`, None if there is none."""
        try:
            home = self._clusters.by_id(chosen.decode_node).cluster
            other = self.route(request, {*failed, *self._links.cut_off_from(chosen.decode_node)}, home)
        except (Unavailable, NodeError):
            return None
        return other if other.prefill_node is not None else None


def _tie(request_id: str) -> float:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=4).digest()) / 2**32
