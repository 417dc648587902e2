"""Chooses among model servers by the gateway's own rule: `route_among`, and its placements by name.

Servers that prefill alone compute prompts for those that decode. Without them, a server that decodes does both. PrfaaS nodes
prefill for PrfaaS nodes, and llm-d's servers for theirs: of the two kinds, that which answers first is chosen.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.picker.admission import PickLimits, refusal
from gateway.picker.asking import MAX_NAME_CHARS, PickRequest
from gateway.picker.exchange import EndpointChoice, Refusal
from gateway.picker.headers import NO_ENDPOINTS
from gateway.picker.servers import NODES, ModelServer, ServerPool
from planner.decisions.routing.offload import ReadyNodes, Route, Target, route_among
from planner.decisions.routing.placement import PLACERS, Placer
from planner.decisions.routing.policy import RoutingPolicy
from planner.decisions.views import NodeView, PrefillCost, RouteRequest

RETRY_S: Final = 1.0
TIES: Final = 2654435761  # odd: chance that two pickers do not share, from a count


@dataclass(frozen=True, slots=True, kw_only=True)
class PickSettings:
    """How servers are chosen. `fallbacks` more are named after the best one: not every proxy reads such a list."""

    placement: str = "kvcache_centric"
    fallbacks: int = 0
    tokens_per_s: float = 20_000.0
    increment_tokens: int = 1024


class Pick:
    """A request's place on its servers, until `end`."""

    def __init__(self, choice: EndpointChoice, end: Callable[[bool], None]) -> None:
        self.choice = choice
        self._end = end
        self._has_ended = False

    def end(self, is_answered: bool = True) -> None:
        """The request is over, or a proxy that does not tell of its answer has said all it will; once counts."""
        if not self._has_ended:
            self._has_ended = True
            self._end(is_answered)


class ServerPicker:
    """Picks for each request, and keeps count of what it has picked."""

    def __init__(self, pool: ServerPool, settings: PickSettings, limits: PickLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._fallbacks = settings.fallbacks
        self._cost = PrefillCost(settings.tokens_per_s)
        self._place: Placer = PLACERS[settings.placement]
        self._policy = RoutingPolicy(threshold_tokens=0, increment_tokens=settings.increment_tokens)
        self._in_flight: Counter[str] = Counter()  # by tenant
        self._count = 0

    @property
    def in_flight(self) -> int:
        """Requests whose end has not been heard of."""
        return self._in_flight.total()

    @property
    def ready(self) -> int:
        """Servers that may be chosen."""
        return sum(not server.prefills_only for server in self._pool.usable())

    async def pick(self, asked: PickRequest) -> Pick | Refusal:
        """The servers of a request, or why it gets none."""
        servers = self._pool.usable(asked.subset, asked.model)
        decoding = [server for server in servers if not server.prefills_only]
        if not decoding:
            return self._none(asked)
        self._count += 1
        views = _turned(self._pool.views(servers, asked.prompt), self._count)
        route = self._route(asked, views)
        refused = refusal(asked, self._pool.reports(decoding), route.ttft_s, self._in_flight, self._limits)
        if refused is not None:
            return refused
        endpoints = [route.decode_node, *self._others(asked, views, route)]
        return self._picked(asked, route, endpoints)

    def _none(self, asked: PickRequest) -> Refusal:
        """404 for a model that no server has, else 503: a server of it may come back."""
        if asked.model and len(self._pool) and not self._pool.has_model(asked.model):
            text = f"no server serves the model {asked.model[:MAX_NAME_CHARS]!r}"
            return Refusal(status=404, text=text, reason=NO_ENDPOINTS)
        of_model = f" of the model {asked.model[:MAX_NAME_CHARS]!r}" if asked.model else ""
        text = f"no server{of_model}{'' if asked.subset is None else ' of the subset'} is ready"
        return Refusal(status=503, text=text, reason=NO_ENDPOINTS, retry_after_s=RETRY_S)

    def _route(self, asked: PickRequest, views: Sequence[NodeView], without: Collection[str] = ()) -> Route:
        prompt = asked.prompt
        wanted = RouteRequest(
            num_tokens=prompt.num_tokens,
            tie=self._count * TIES % 2**32 / 2**32,
            answer_tokens=prompt.answer_tokens,
        )
        decodes = [view for view in views if view.role == "decode" and view.node_id not in without]
        kinds = {view.cluster for view in decodes}
        routes = [self._route_within(kind, wanted, views, decodes) for kind in sorted(kinds)]
        return min(routes, key=lambda route: route.ttft_s)

    def _route_within(
        self, kind: str, wanted: RouteRequest, views: Sequence[NodeView], decodes: Sequence[NodeView]
    ) -> Route:
        is_short = kind == NODES and wanted.num_tokens <= self._policy.increment_tokens  # not worth a reservation
        prefills = [view for view in views if view.role == "prefill" and view.cluster == kind and not is_short]
        decodes = [view for view in decodes if view.cluster == kind]
        if prefills:
            ready = ReadyNodes({kind: prefills}, decodes)
            return route_among(ready, wanted, (), self._policy, place=self._place, cost=self._cost)
        # Each computes its own prompts: the one that does so first is chosen, as among prefill nodes.
        found = self._place.prefill(wanted, decodes, decodes, self._policy.placement, self._cost)
        ready = ReadyNodes({}, [found.node])
        return route_among(ready, wanted, (), self._policy, place=self._place, cost=self._cost)

    def _others(self, asked: PickRequest, views: Sequence[NodeView], route: Route) -> list[str]:
        """The next best ones, to be tried when those before do not answer. If one prefills, it can do so for its kind alone."""
        found: list[str] = []
        best = route.decode_node
        if route.target is not Target.DECODE:
            kind = next(view.cluster for view in views if view.node_id == best)
            views = [view for view in views if view.cluster == kind]
        rest = sum(view.role == "decode" for view in views) - 1
        for _ in range(min(self._fallbacks, rest)):
            found.append(self._route(asked, views, without={best, *found}).decode_node)
        return found

    def _picked(self, asked: PickRequest, route: Route, endpoints: Sequence[str]) -> Pick:
        servers = [server for name in endpoints if (server := self._pool.by_id(name)) is not None]
        prefiller = None
        if route.target is not Target.DECODE and route.prefill_node is not None:
            prefiller = self._pool.by_id(route.prefill_node)
        best = servers[0]
        computing = prefiller or best
        compute_s = route.compute_s
        predicted = self._pool.took(computing, asked.prompt, compute_s)
        if prefiller is not None:
            self._pool.took(best, asked.prompt, 0.0)
        choice = EndpointChoice(
            tuple(server.address for server in servers), prefiller.address if prefiller is not None else ""
        )
        best.in_flight += 1
        tenant = asked.tenant  # alone: a prompt's names are many, and a pick lasts long
        self._in_flight[tenant] += 1

        def ended(is_answered: bool) -> None:
            self._ended(best, tenant)
            if is_answered:
                self._pool.answered(computing, compute_s, predicted)

        return Pick(choice, ended)

    def _ended(self, server: ModelServer, tenant: str) -> None:
        server.in_flight -= 1
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]


def _turned(views: list[NodeView], number: int) -> list[NodeView]:
    """Another one is first each time: of servers that are as good, the first is chosen."""
    at = number % len(views)
    return views[at:] + views[:at]
