"""One request's life, through eight rooms in one direction; what one room has found is handed to the next.

    receive   the body, at a minimum rate and within bounds                             gateway.receive
    admit     a place among those being served                                          gateway.admit
    read      the body's call, and tokens, block hashes and digest of its prompt        gateway.read
    decide    local or remote, which nodes: a pure function of what is known            gateway.decide
              and whether its class would be served as promised                         gateway.refuse
    reserve   the decode node makes room and hands out a ticket                         gateway.reserve
    run       both legs at once                                                         gateway.run
    relay     the decode node's bytes, unchanged but for the number of cached tokens    gateway.relay
    settle    the books are closed                                                      gateway.settle

Everything held on a node is held by a `with` block: the client going away, a node dying and the answer ending all leave
by the same door. What fails before the client has seen a byte goes back to `decide` as often as `planner.decisions.retries`
allows.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.accounts import Accounts
from gateway.bookings import booked
from gateway.clusters import Clusters
from gateway.decide import Decider
from gateway.errors import DecodeFailed, KillsEngines, NodeError, NodeFailure, Unavailable
from gateway.refuse import Refusals
from gateway.replicas import Replicas
from gateway.request import Request
from gateway.reserve import Reservations
from gateway.run import Attempt, Runner
from gateway.waiting import Place, WaitingLine
from planner.decisions.retries import MAX_DEATHS, Failure, Next, Stage, rule_after, tries_of
from planner.decisions.routing import Route, Target


@dataclass(slots=True)
class Tried:
    """What a request has behind it: the decode nodes that failed, and the routes to those that only lacked room."""

    failed: dict[str, Failure] = field(default_factory=dict)
    full: dict[str, Route] = field(default_factory=dict)


class Dispatcher:
    """Takes a request that has been read and admitted to a decode node that answers it."""

    def __init__(
        self,
        clusters: Clusters,
        decider: Decider,
        reservations: Reservations,
        runner: Runner,
        accounts: Accounts,
        replicas: Replicas | None,
        refusals: Refusals,
        line: WaitingLine,
        clock: Callable[[], float],
        max_tries: int,
    ) -> None:
        self._clusters = clusters
        self._decider = decider
        self._reservations = reservations
        self._runner = runner
        self._accounts = accounts
        self.replicas = replicas
        self._refusals = refusals
        self._line = line
        self._clock = clock
        self._max_tries = max_tries

    @asynccontextmanager
    async def answered(self, request: Request) -> AsyncIterator[Attempt]:
        """The attempt that is answered, to be relayed inside the block; leaving the block frees everything.

        Raises ApiError.
        """
        async with AsyncExitStack() as held:
            held.callback(self._refusals.left, request)
            attempt = await self._first_answer(request, held)
            self._accounts.answering(request)
            if request.route is not None:  # whoever computed the prompt
                self._refusals.decoding(request, request.route.decode_node)
            yield attempt
            if request.is_answered and attempt.answer.status == 200:
                self._decider.learn_answer(request)

    async def _first_answer(self, request: Request, held: AsyncExitStack) -> Attempt:
        """The first attempt whose decode node answers; what it holds is handed to `held`."""
        tried = Tried()
        share = request.tenant.share
        place = held.enter_context(self._line.place(request.service, request.timeline.arrived, share))
        chosen = self._decider.route(request)
        place.tokens = chosen.uncached_tokens
        self._accounts.asked(chosen)
        if chosen.prefill_node and len(self._line):  # others came first
            self._refusals.check(request, chosen, self._line.expected_s(request.service, share))
            await place.wait()
            chosen = self._decider.route(request)
        self._refusals.check(request, chosen)
        self._refusals.accepted(request, chosen)
        while True:
            self._accounts.routed(request, chosen, len(tried.failed))
            if self.replicas and chosen.prefill_node:
                self.replicas.wanted(request.prompt, chosen.prefill_node)
            try:
                return await held.enter_async_context(self._attempt(request, chosen, place))
            except (DecodeFailed, NodeError) as error:
                if not (place.stands and error.failure is Failure.FULL):  # that it still waits is no news
                    self._accounts.fell_back(request, f"decode_{error.reason}", error)
                following = self._next_route(request, chosen, error, tried)
            if following is None:
                await place.wait()
                tried = Tried()
                following = self._decider.route(request)
                self._refusals.check(request, following)
                self._refusals.accepted(request, following)
            chosen = following

    @asynccontextmanager
    async def _attempt(self, request: Request, chosen: Route, place: Place) -> AsyncIterator[Attempt]:
        # Nothing is awaited between the decision and its booking: the next decision sees this one.
        decode = self._clusters.by_id(chosen.decode_node)
        with booked(decode, self._clock, request.prompt.hashes) as booking:
            booking.prefill(self._clusters.by_id(chosen.prefill_node or chosen.decode_node), chosen)
            try:
                async with self._reservations.held(request, chosen) as hold:
                    place.served()
                    async with self._runner.attempt(request, chosen, hold, booking) as attempt:
                        yield attempt
            finally:
                self._line.freed()

    def _next_route(self, request: Request, chosen: Route, error: NodeFailure, tried: Tried) -> Route | None:
        """The route after one that failed; None: there is no room now, and a decode node may not do more by itself.

        Raises ApiError when there is to be none.
        """
        tried.failed[chosen.decode_node] = error.failure
        stage = Stage.RESERVE if isinstance(error, NodeError) else Stage.DECODE
        tries, deaths = tries_of(tried.failed.values()), len(request.deaths)
        rule = rule_after(stage, error.failure, tries=tries, max_tries=self._max_tries, deaths=deaths)
        if rule.otherwise is Next.ALONE:
            tried.full[chosen.decode_node] = chosen
        if stage is Stage.DECODE:  # it has computed the prompt itself, or was to: it is not asked for that again
            tried.full.pop(chosen.decode_node, None)
        if rule.suspect:
            self._clusters.suspect(chosen.decode_node)
        if rule.next is Next.ELSEWHERE:
            return self._elsewhere(request, tried)
        if rule.next is Next.ALONE:
            return _alone(chosen) if error.failure is Failure.REQUEST else self._alone_if_spared(chosen)
        if deaths >= MAX_DEATHS:
            raise KillsEngines(request.deaths)
        raise Unavailable(f"{tries} decode nodes failed in turn.", "attempts_exhausted")

    def _elsewhere(self, request: Request, tried: Tried) -> Route | None:
        try:
            return self._decider.route(request, tried.failed)
        except Unavailable:
            if tried.full:
                return self._alone_if_spared(next(reversed(tried.full.values())))
            if Failure.AWAY in tried.failed.values():  # whoever has taken its place is about to say so
                return None
            raise

    def _alone_if_spared(self, chosen: Route) -> Route | None:
        """A full system must not turn its decode nodes into prefill nodes."""
        return _alone(chosen) if self._decider.may_compute(chosen.decode_node) else None


def _alone(chosen: Route) -> Route:
    """The same decode node, which has no room for a landing, without one."""
    return replace(chosen, target=Target.DECODE, prefill_node=None, fetch_from=None)
