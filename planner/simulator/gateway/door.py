"""Admission of a simulated system, by the gateway's rules: promises, refusals, and waiting for room."""

from collections.abc import Callable, Iterable, Mapping
from math import inf

import numpy as np

from planner.decisions.admission.classes import ServiceClass
from planner.decisions.admission.overload import ACCEPTED, Admission, AdmissionPolicy, Expected, admit, admit_to_decode
from planner.decisions.admission.waiting import DrainRate, WaitQueue
from planner.decisions.estimates.decoding import DecodeForecast
from planner.decisions.routing.offload import Route
from planner.model.profile import Floats
from planner.simulator.loop import Loop
from planner.simulator.nodes.node import DecodeNode, SimulatedRequest
from planner.simulator.scenario import LineLimits


class Door:
    """Asks the planner's rules, and keeps what they ask for."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        classes: Mapping[ServiceClass, float],
        limits: LineLimits | None,
        decodes: Mapping[str, DecodeNode],
        loop: Loop,
        *,
        consider: Callable[[float, SimulatedRequest], None],
        refuse: Callable[[float, SimulatedRequest, str], None],
        decode_s: float,
        draws: Floats,
    ) -> None:
        """`classes` by their shares of the requests; `draws` in [0, 1) say which one each is of.

        For a waiting request, `consider` says ask again, and `refuse` says go.
        """
        self.wasted_s = 0.0
        self._policy = policy
        self._limits = limits
        self._loop = loop
        self._consider = consider
        self._refuse = refuse
        self._forecasting = policy is not AdmissionPolicy.ACCEPT_ALL
        self.is_open = limits is None and not self._forecasting  # no request is refused, and none waits
        self._forecast = DecodeForecast(decode_s)
        self._decoding = 0
        self.classes = tuple(classes)
        shares = np.cumsum([classes[each] for each in self.classes])
        self.class_of = np.searchsorted(shares / shares[-1], draws, side="right")
        self._decodes = decodes
        self.count_room()
        self._line: WaitQueue[SimulatedRequest] = WaitQueue(
            limits.max_waiting if limits else 1, limits.ageing_s if limits else inf
        )
        self._drain = DrainRate()

    def count_room(self) -> None:
        """Counts what decode holds within each class's TBT; to be called when other nodes are ready than before."""
        ready = [node for node in self._decodes.values() if node.ready]
        self.rooms = {each: _room(each.tbt_s, ready) for each in self.classes}

    def service(self, index: int) -> ServiceClass:
        """The class of a request."""
        return self.classes[int(self.class_of[index])] if len(self.classes) > 1 else self.classes[0]

    # Who is refused

    def admission(self, now: float, job: SimulatedRequest, route: Route) -> Admission:
        """Whether it may go as `route` says."""
        if not self._forecasting:
            return ACCEPTED
        service = self.service(job.index)
        expected = Expected(
            computed_s=route.ttft_s, alone_s=route.compute_s, arrived_s=route.link_s, waited_s=now - job.arrived
        )
        return admit(
            self._policy, service, expected, room=self.rooms[service], decoding=self._decoding,
            forecast=self._forecast, now=now,
        )  # fmt: skip

    def accepted(self, now: float, job: SimulatedRequest, route: Route) -> None:
        """It goes."""
        if self._forecasting:
            job.forecast = now + max(route.ttft_s, route.link_s)
            self._forecast.on_accepted(job.forecast, now)

    def to_decode(self, job: SimulatedRequest) -> Admission:
        """Whether decode takes it after its prefill; if not, that was in vain."""
        if not self._forecasting:
            return ACCEPTED
        service = self.service(job.index)
        found = admit_to_decode(
            self._policy, service, room=self.rooms[service], decoding=self._decoding, forecast=self._forecast
        )
        if found.accepted:
            self._decoding += 1
        else:
            self._forecast.on_dropped(job.forecast)
            self.wasted_s += job.service_s
        return found

    def started(self, job: SimulatedRequest) -> None:
        """Its first token is there."""
        if self._forecasting:
            self._forecast.on_started(job.forecast)

    def ended(self, now: float, job: SimulatedRequest) -> None:
        """Its last one is."""
        if self._forecasting:
            self._decoding -= 1
            self._forecast.on_ended(job.decode_start, now)

    # Who waits

    def has_room(self, now: float, job: SimulatedRequest, node: DecodeNode) -> bool:
        """Whether a decode node takes it now: there is a place, and no other request comes first."""
        if self._limits is None:
            return True
        first = self._line.first(now)
        return node.assigned < node.profile.max_running + self._limits.landings and first in (None, job)

    def stand(self, now: float, job: SimulatedRequest) -> None:
        """There is no room: it stands in line from now on, or goes."""
        if job in self._line:
            return
        assert self._limits is not None
        service = self.service(job.index)
        due = min(now + self._limits.room_s, job.arrived + service.deadline_s)
        if self._drain.is_known and now + self._drain.wait_s(self._line.ahead_of(service.priority, due, now)) > due:
            self._refuse(now, job, "no_room")
            return
        if not self._line:
            self._drain.on_line(now)
        joined = self._line.join(job, now, priority=service.priority, due=due)
        if not joined.accepted:
            self._refuse(now, job, "no_room")
            return
        self._loop.at(due, self._on_patience, job)
        if joined.displaced is not None:
            self._refuse(now, joined.displaced, "displaced")

    def let_in(self, now: float) -> None:
        """Room has become free: the first in line asks again, and the next one if it got some."""
        while (first := self._line.first(now)) is not None:
            self._consider(now, first)
            if first in self._line:
                break

    def _on_patience(self, now: float, job: SimulatedRequest) -> None:
        if job in self._line:
            self._refuse(now, job, "no_room")

    def leave(self, now: float, job: SimulatedRequest, *, served: bool) -> None:
        """It is out of the line, if it was in it."""
        if not served:
            self._line.leave(job)
        elif self._line.serve(job):
            self._drain.on_turn(now)


def _room(tbt_s: float, decodes: Iterable[DecodeNode]) -> float:
    """Requests that keep a TBT, over all decode nodes."""
    slots = 0.0
    for node in decodes:
        profile = node.profile
        room = profile.max_running
        if profile.step_s_per_request > 0 and tbt_s < inf:
            room = max(1, min(room, int((tbt_s - profile.step_s) / profile.step_s_per_request)))
        slots += room
    return slots
