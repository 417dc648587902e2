"""Routes a request by what is known of the clusters now, books its work, and learns from what ends."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.links import ClusterLinks
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters, unfit
from gateway.cluster.served_model import ServedModel
from gateway.config.gateway import GatewayConfig
from gateway.errors import AgentCallFailed, NoDecodeNode, NoPrefillNode, Unavailable
from gateway.request.request import Request
from gateway.routing.prefix_transfers import PrefixTransfer
from hybrid_cache.index.index import NOTHING
from planner.decisions.estimates.accuracy import Accuracy, Error
from planner.decisions.estimates.durations import AnswerEstimate, LearnedCost, MoveDelays, MoveEstimate
from planner.decisions.plans.live_plan import LivePlan, PlanSetting
from planner.decisions.routing.congestion import pressure
from planner.decisions.routing.explain import Explanation, explain_among
from planner.decisions.routing.offload import Route, route_among
from planner.decisions.routing.placement import PLACERS
from planner.decisions.routing.policy import PlacementPolicy, RoutingPolicy
from planner.decisions.routing.revisions import RevisionChoice, choose_revision
from planner.decisions.views import LinkView, RouteRequest
from planner.errors import NobodyPrefills, NoReadyNode


class Router:
    """Asks the planner's rule, in this gateway's words and with its limits."""

    def __init__(
        self,
        config: GatewayConfig,
        clusters: Clusters,
        links: ClusterLinks,
        cost: LearnedCost,
        clock: Callable[[], float],
    ) -> None:
        self._clusters = clusters
        self._clock = clock
        self._links = links
        self._cost = cost
        self._fetch_bytes_per_s = 0.0
        self._moves: MoveEstimate | None = None
        self._delays = MoveDelays()
        self._plan: LivePlan | None = None
        self._own = PlanSetting(threshold_tokens=config.threshold_tokens, tie_share=config.routing.tie_share)
        self._answers = AnswerEstimate()
        self._arrivals: dict[tuple[str, str], Accuracy] = {}  # over a link, by (source, destination)
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Decides as `config` says from now on. What was learned of moves begins anew with another rate for them."""
        routing = config.routing
        self._own = PlanSetting(threshold_tokens=config.threshold_tokens, tie_share=routing.tie_share)
        self._home = routing.home_cluster or None
        self._balancing_ratio = routing.balancing_ratio or None
        self._decode_load_slack = routing.decode_load_slack
        if routing.fetch_bytes_per_s != self._fetch_bytes_per_s:
            self._fetch_bytes_per_s = routing.fetch_bytes_per_s
            self._moves = MoveEstimate(routing.fetch_bytes_per_s) if routing.fetch_bytes_per_s else None
        self._policy = RoutingPolicy(
            threshold_tokens=self.setting.threshold_tokens,
            tie_share=self.setting.tie_share,
            cross_cluster_cache=routing.cross_cluster_cache,
            increment_tokens=routing.increment_tokens,
            decode_prefill_share=routing.decode_prefill_share,
            by_total_length=routing.by_total_length,
            placement=self._placement(),
        )
        self._place = PLACERS[routing.placement]
        self._cost.assume(routing.prefill_tokens_per_s)

    @property
    def setting(self) -> PlanSetting:
        """The threshold and tie share that hold: the plan's, or without one those of the configuration."""
        return self._own if self._plan is None else self._plan.setting

    def follow(self, plan: LivePlan) -> None:
        """Decides as `plan` says from now on; the configuration's threshold waits until there is no plan."""
        self._plan = plan
        self._policy = replace(
            self._policy, threshold_tokens=plan.setting.threshold_tokens, tie_share=plan.setting.tie_share
        )

    def _placement(self) -> PlacementPolicy:
        slack = self._decode_load_slack
        if self._moves is None:
            return PlacementPolicy(balancing_ratio=self._balancing_ratio, decode_load_slack=slack)
        return PlacementPolicy(
            balancing_ratio=self._balancing_ratio,
            decode_load_slack=slack,
            fetch_bytes_per_s=self._moves.bytes_per_s,
            fetch_calls_s=self._moves.calls_s,
            fetch_lateness=self._moves.lateness,
        )

    def _policy_now(self) -> RoutingPolicy:
        """The policy, and in it which moves are feared to be late."""
        if not self._delays:
            return self._policy
        placement = replace(self._policy.placement, fetch_delays_s=self._delays.at(self._clock()))
        return replace(self._policy, placement=placement)

    def route(self, request: Request, exclude: Collection[str] = (), home: str | None = None) -> Route:
        """Where `request` goes now, leaving the nodes of `exclude` out. Raises Unavailable."""
        question = self._question(request, home)
        self._cost.as_of(self._clock())
        if not request.prompt.is_plain:
            exclude = {*exclude, *unfit(self._clusters.nodes, request.prompt)}
        nodes, links = self._clusters.views(request.prompt, exclude), self._links.views()
        with _named(request):
            found = route_among(nodes, question, links, self._policy_now(), place=self._place, cost=self._cost)
        if found.prefill_node is not None:
            node = self._clusters.by_id(found.prefill_node)
            self._cost.tried(node.id, node.cluster)
        return found

    def revision(self, request: Request, exclude: Collection[str] = ()) -> ServedModel:
        """The revision of the model whose nodes serve a request that has none yet. Raises Unavailable."""
        options = self._revisions(request)
        if len(options) == 1:
            return next(iter(options.values()))
        return options[self._weighed(request, options, exclude).revision]

    def other_revision(self, request: Request, exclude: Collection[str] = ()) -> ServedModel | None:
        """Another revision for a request that its own cannot serve any more; None: there are no others.

        An answer that has begun goes on by the same weights alone: others would not have begun it so.
        """
        options = {
            name: each
            for name, each in self._revisions(request).items()
            if name != request.served.revision
            and (not request.progress.answered or each.layout.model == request.served.layout.model)
        }
        try:
            return options[self._weighed(request, options, exclude).revision] if options else None
        except Unavailable:
            return None

    def weighed(self, request: Request) -> RevisionChoice | None:
        """How a revision would be chosen now; None: there is one only. Raises Unavailable."""
        options = self._revisions(request)
        return self._weighed(request, options) if len(options) > 1 else None

    def _revisions(self, request: Request) -> dict[str, ServedModel]:
        """Those in which its prompt has names: without any, the one that it was read for."""
        known = self._clusters.revisions
        return {name: known[name] for name in request.prompt.revisions if name in known} or {
            request.served.revision: request.served
        }

    def _weighed(
        self, request: Request, options: Mapping[str, ServedModel], exclude: Collection[str] = ()
    ) -> RevisionChoice:
        self._cost.as_of(self._clock())
        if not request.prompt.is_plain:
            exclude = {*exclude, *unfit(self._clusters.nodes, request.prompt)}
        with _named(request):
            return choose_revision(
                {name: self._clusters.views(request.prompt.within(name), exclude) for name in options},
                self._question(request),
                self._links.views(),
                self._policy_now(),
                draw=tie_of(f"revision/{request.drawn_by or request.leg_id}"),
                place=self._place,
                cost=self._cost,
                sizes={name: each.layout.kv_bytes for name, each in options.items()},
            )

    def explain(self, request: Request, revision: str) -> Explanation:
        """What `route` would say now in that revision, and why; nothing is sent or learned. Raises Unavailable."""
        self._cost.as_of(self._clock())
        exclude = () if request.prompt.is_plain else unfit(self._clusters.nodes, request.prompt)
        nodes, links = self._clusters.views(request.prompt.within(revision), exclude), self._links.views()
        question, policy = self._question(request), self._policy_now()
        if (served := self._clusters.revisions.get(revision)) is not None:
            question = msgspec.structs.replace(question, kv_bytes=served.layout.kv_bytes)
        with _named(request):
            return explain_among(nodes, question, links, policy, place=self._place, cost=self._cost)

    @property
    def plan_version(self) -> int:
        """Of the plan that is followed; 0: none."""
        return self._plan.version if self._plan is not None else 0

    def _question(self, request: Request, home: str | None = None) -> RouteRequest:
        return RouteRequest(
            num_tokens=request.prompt.num_tokens,
            kv_bytes=request.served.layout.kv_bytes,
            tie=tie_of(request.leg_id),
            answer_tokens=self._answers.tokens(request.call.options.output_tokens),
            home=home or self._home,
            unshared=request.is_unshared,
        )

    def pressure(self, link: LinkView) -> float:
        """How congested a link is to decisions, 0 (not) to 1 (blocked)."""
        return pressure(link, self._policy)

    def may_compute(self, decode_node: str) -> bool:
        """Whether a decode node can compute a prompt, and has time for one that a prefill node should have computed."""
        try:
            node = self._clusters.by_id(decode_node)
        except AgentCallFailed:
            return True  # it is another one by now, and will say so
        if node.is_paired:
            return False
        share = node.prefill_share.at(self._clock())
        return share < self._policy.decode_prefill_share

    def learn(self, node: ClusterNode, outcome: PrefillOutcome) -> None:
        """`node` has computed a prompt."""
        computed, seconds = outcome.num_tokens - outcome.cached_tokens, outcome.prefill_end_s - outcome.prefill_start_s
        self._cost.as_of(self._clock())
        self._cost.observe(node.id, node.cluster, computed, outcome.cached_tokens, seconds)

    def learn_arrival(self, request: Request, way: Route, node: ClusterNode, decode: ClusterNode) -> None:
        """What was to cross a link is there now; only where nothing went wrong does that say anything of the prediction."""
        routed = request.progress.timeline.routed
        if way.arrives_s and routed is not None and not request.progress.fallbacks:
            accuracy = self._arrivals.setdefault((node.cluster, decode.cluster), Accuracy())
            accuracy.note(way.arrives_s, self._clock() - routed)

    def answer_tokens(self) -> float:
        """How many an answer mostly has, of late."""
        return self._answers.tokens()

    def learn_answer(self, request: Request) -> None:
        """`request` has been answered."""
        self._answers.observe(request.output_tokens, request.call.options.output_tokens)

    def errors(self) -> dict[tuple[str, str], Error]:
        """How wrong late predictions were, by what was predicted, and of what."""
        found = {("prefill", cluster): error for cluster, error in self._cost.errors().items()}
        for (source, destination), accuracy in self._arrivals.items():
            found["transfer", f"{source} to {destination}"] = accuracy.error
        if self._moves is not None:
            found["transfer", "moves"] = self._moves.error
        found["output", "answers"] = self._answers.error
        return {key: error for key, error in found.items() if error.samples}

    def learn_move(self, move: PrefixTransfer, sent: int, seconds: float) -> None:
        """A prefix has moved; what it took says what the next one takes, inside a cluster."""
        self._delays.arrived(move.source.id, move.target.id)
        if self._moves is not None and move.source.cluster == move.target.cluster:
            self._moves.observe(sent, seconds)
            self._policy = replace(self._policy, placement=self._placement())

    def pays(self, move: PrefixTransfer) -> bool:
        """Whether a copy for later requests is predicted to arrive before computing it would: else nothing is sent."""
        if self._moves is None:
            return True
        expected_s = self._moves.seconds(move.num_bytes)
        delay_s = self._delays.at(self._clock()).get((move.source.id, move.target.id), 0.0)
        computed_s = self._cost.prefill_s(move.target.view(NOTHING, 1, self._clock()), move.num_tokens, 0)
        return expected_s + delay_s < computed_s

    def learn_late_move(self, move: PrefixTransfer, seconds: float) -> None:
        """A prefix has not moved; for some time the next one between the two nodes is expected to be late."""
        expected_s = self._moves.seconds(move.num_bytes) if self._moves is not None else 0.0
        self._delays.failed(move.source.id, move.target.id, expected_s, seconds, self._clock())
        self._delays.keep({node.id for node in self._clusters.nodes})

    def other_prefill(self, request: Request, chosen: Route, failed: Collection[str]) -> Route | None:
        """A route by another prefill node to the decode cluster of `chosen`, None without one."""
        try:
            home = self._clusters.by_id(chosen.decode_node).cluster
            other = self.route(request, {*failed, *self._links.cut_off_from(chosen.decode_node)}, home)
            if self._clusters.by_id(other.decode_node).cluster != home:  # no node prefills for `home`
                return None
        except (Unavailable, AgentCallFailed):
            return None
        return other if other.prefill_node is not None else None


@contextmanager
def _named(request: Request) -> Iterator[None]:
    """Where a rule of the planner's finds no node inside, raises Unavailable, which names the model."""
    try:
        yield
    except NobodyPrefills as error:
        raise NoPrefillNode(request.served.name) from error
    except NoReadyNode as error:
        raise NoDecodeNode(request.served.name) from error


def tie_of(request_id: str) -> float:
    """A number in [0, 1) of a request's own."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=4).digest()) / 2**32
