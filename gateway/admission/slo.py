"""Refuses requests that would miss their class's promise, before anything is held or computed for them.

What it takes to know that is kept here as well: which requests decode has, which will come to it, and how long its steps are.
Of what other gateways have sent only the number is known, from the nodes' reports.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig
from gateway.errors import Overloaded
from gateway.request.request import Request
from planner.decisions.admission.overload import (
    Admission,
    AdmissionPolicy,
    Expected,
    RejectReason,
    admit,
    admit_to_decode,
)
from planner.decisions.estimates.decoding import DecodeForecast, LearnedSteps
from planner.decisions.routing.offload import Route
from planner.decisions.views import Role

TYPICAL_STEP_S: Final = 0.02  # from token to token, where no stream has shown it
DECODE_S: Final = 10.0  # of an answer, until some have ended

MESSAGES: Final = {
    RejectReason.PREFILL_OVERLOAD: "the queue of its prefill node is too long",
    RejectReason.LINK_OVERLOAD: "too much waits for the link between the clusters",
    RejectReason.DECODE_OVERLOAD: "decode will be too busy",
    RejectReason.DECODE_OVERLOAD_AFTER_PREFILL: "decode is too busy by now",
    RejectReason.DEADLINE: "its deadline comes before its first token would",
}


@dataclass(slots=True)
class DecodeStay:
    """An accepted request as decode will have it, or has it."""

    expected: float  # when its first token was predicted to come
    since: float | None = None  # it decodes
    until: float | None = None  # its engine has said all, whether its client has read that or not
    node: str = ""
    beside: float = 0.0  # requests that decode there, itself included: when it began, then the mean of begin and end


class SloGate:
    """Asks the planner's rule of a request that has been routed, and follows those accepted to their end."""

    def __init__(
        self, config: GatewayConfig, clusters: Clusters, steps: LearnedSteps, clock: Callable[[], float]
    ) -> None:
        self._clusters = clusters
        self._clock = clock
        self._forecast = DecodeForecast(DECODE_S, samples=0)
        self._steps = steps
        self._decoding: Counter[str] = Counter()  # by decode node
        self._stays: dict[Request, DecodeStay] = {}
        self.configure(config)

    @property
    def running(self) -> int:
        """Requests of this gateway that decode now."""
        return self._forecast.running

    def configure(self, config: GatewayConfig) -> None:
        """Decides as `config` says from now on."""
        self._policy = config.admission.policy
        self._slots = config.routing.decode_slots

    def check(self, request: Request, chosen: Route, line_s: float = 0.0) -> None:
        """Raises Overloaded, with its binding stage, for a request that goes as `chosen` after `line_s` in line."""
        service, now = request.service, self._clock()
        if not service.promises or self._policy is AdmissionPolicy.ACCEPT_ALL:
            return
        expected = Expected(
            computed_s=chosen.ttft_s,
            alone_s=chosen.compute_s,
            arrived_s=chosen.link_s,
            waited_s=now - request.progress.timeline.arrived + line_s,
        )
        verdict = admit(
            self._policy, service, expected, room=self._room(request), decoding=self._forecast.running,
            forecast=self._forecast, now=now,
        )  # fmt: skip
        _raise_unless_accepted(verdict, request)

    def accepted(self, request: Request, chosen: Route) -> None:
        """It goes as `chosen`, and will come to decode."""
        self.left(request)
        now = self._clock()
        self._stays[request] = stay = DecodeStay(now + max(chosen.ttft_s, chosen.link_s))
        self._forecast.on_accepted(stay.expected, now)

    def computed(self, request: Request, decode_node: str) -> None:
        """Its KVCache is with its decode node. Raises Overloaded where only now it is asked whether that can take it."""
        is_asked = self._policy is AdmissionPolicy.BASELINE and request.service.promises
        if is_asked and request.progress.timeline.first_token is None:
            verdict = admit_to_decode(
                self._policy, request.service, room=self._room(request), decoding=self._forecast.running,
                forecast=self._forecast,
            )  # fmt: skip
            _raise_unless_accepted(verdict, request)
        stay = self._stays.get(request)
        if stay is not None and stay.since is None:  # else its answer has begun, or is over already
            self.decoding(request, decode_node)

    def decoding(self, request: Request, decode_node: str) -> None:
        """It decodes there, if that is news; a node that had it before has failed."""
        stay = self._stays.get(request)
        if stay is None or (stay.node == decode_node and stay.until is None):
            return
        if stay.since is None:
            self._forecast.on_started(stay.expected)
        elif stay.until is None:
            self._gone_from(stay.node)
        else:
            self._forecast.on_back()
        self._decoding[decode_node] += 1
        stay.since, stay.until = self._clock(), None
        stay.node, stay.beside = decode_node, self._decoding[decode_node]

    def decoded(self, request: Request) -> None:
        """Its engine has said all: decode is through with it, whether its client has read that or not."""
        if (stay := self._stays.get(request)) is not None:
            self._through(stay)

    def left(self, request: Request) -> int:
        """It is over, or goes another way; the estimated tokens that its engine had said and no client has read."""
        stay = self._stays.pop(request, None)
        if stay is None:
            return 0
        if stay.since is None:
            self._forecast.on_dropped(stay.expected)
            return 0
        ended = self._through(stay)
        if not request.is_served:
            return self._unheard_tokens(request, stay, ended)
        self._forecast.learn(ended - stay.since)
        if (tbt_s := request.tbt_s) is not None:
            self._steps.observe(stay.node, stay.beside, tbt_s)
        return 0

    def _unheard_tokens(self, request: Request, stay: DecodeStay, ended: float) -> int:
        """What is estimated of an answer that comes as a whole, and has not come."""
        if request.call.stream or request.progress.timeline.first_token is not None or stay.since is None:
            return 0
        if request.progress.route is not None and request.progress.route.decode_node != stay.node:
            return 0  # that node has failed, and the next one does not decode yet
        began = stay.since if request.progress.outcome is not None else max(stay.since, stay.expected)
        step_s = self._steps.step_s(stay.node, stay.beside) or TYPICAL_STEP_S
        most = request.call.options.output_tokens
        said = int(max(0.0, ended - began) / step_s)
        return said if most is None else min(said, most)

    def _through(self, stay: DecodeStay) -> float:
        """Decode has no more to do for it: since when."""
        if stay.until is None:
            stay.until = self._clock()
            stay.beside = (stay.beside + self._decoding[stay.node]) / 2
            self._gone_from(stay.node)
            self._forecast.on_left()
        return stay.until

    def _gone_from(self, node_id: str) -> None:
        self._decoding[node_id] -= 1
        if not self._decoding[node_id]:
            del self._decoding[node_id]

    def _room(self, request: Request) -> float:
        """Requests of this gateway that decode can hold within the TBT of this one's class."""
        ready = self._clusters.ready(Role.DECODE, request.served.revision)
        room = self._steps.room([node.id for node in ready], self._slots, request.service.tbt_s)
        return room - sum(node.others for node in ready)

    def forget(self, node_id: str) -> None:
        """The node is gone, or is not what it was."""
        self._steps.forget(node_id)


def _raise_unless_accepted(verdict: Admission, request: Request) -> None:
    if verdict.accepted:
        return
    assert verdict.reason is not None
    raise Overloaded(
        f"The class '{request.service.name}' cannot be served as promised now: {MESSAGES[verdict.reason]}. Please retry.",
        str(verdict.reason),
        retry_after_s=verdict.retry_after_s,
    )
