"""Decides which requests to refuse: Mooncake's overload-oriented scheduling (§4.3), by predicted SLO violations.

A request is refused that would not keep what its class promises, or would have others not keep it; one whose class promises
nothing never is. The policies differ in which decode load they look at, and when:

    accept_all   never refuses
    baseline     TTFT at arrival; decode load only once the prefill is done, when its work is lost
    early        both as they are at arrival: the decode load is out of date by one prefill time, so it swings
    prediction   the decode load as it will be when this prefill ends

Load is what is refused for, not length: a prompt that takes longer than its SLO in an empty system is judged by its wait.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from planner.decisions.admission.classes import ServiceClass
from planner.decisions.estimates.decoding import DecodeForecast

SPREAD: Final = 0.25  # of a wait: those refused together do not come back together
MOST_RETRY_S: Final = 120.0  # OpenAI's clients do not come back at all if they are told to wait longer


class AdmissionPolicy(StrEnum):
    """When a request may be refused."""

    ACCEPT_ALL = "accept_all"
    BASELINE = "baseline"
    EARLY = "early"
    PREDICTION = "prediction"


class RejectReason(StrEnum):
    """The reason for a refusal: the stage that binds. It also labels the counter of refusals."""

    PREFILL_OVERLOAD = "prefill_overload"
    LINK_OVERLOAD = "link_overload"
    DECODE_OVERLOAD = "decode_overload"
    DECODE_OVERLOAD_AFTER_PREFILL = "decode_overload_after_prefill"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """When a request's first token is expected, in seconds from now, by stage; stages overlap, so the slowest is seen.

    `computed_s` is the prefill's end, queue included, `alone_s` of it without a queue; `arrived_s` is when its KVCache
    is over its link, 0 where it crosses none. `waited_s` have gone by since it came.
    """

    computed_s: float
    alone_s: float = 0.0
    arrived_s: float = 0.0
    waited_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.waited_s + max(self.computed_s, self.arrived_s)


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision. `retry_after_s` is when the stage that refused is predicted to be within its SLO again."""

    accepted: bool
    reason: RejectReason | None = None
    retry_after_s: float = 0.0


ACCEPTED = Admission(True)


def admit(
    policy: AdmissionPolicy,
    promised: ServiceClass,
    expected: Expected,
    *,
    room: float,
    decoding: int,
    forecast: DecodeForecast,
    now: float,
) -> Admission:
    """Whether to take a request, with `decoding` requests in decode now; `room` of them keep the TBT of its class."""
    if policy is AdmissionPolicy.ACCEPT_ALL or not promised.promises:
        return ACCEPTED
    stage = RejectReason.PREFILL_OVERLOAD
    if expected.arrived_s > expected.computed_s:
        stage = RejectReason.LINK_OVERLOAD
    ttft_s = expected.ttft_s
    if ttft_s > promised.deadline_s:
        return Admission(False, RejectReason.DEADLINE, ttft_s - promised.deadline_s)
    limit_s = promised.ttft_s if expected.alone_s <= promised.ttft_s else promised.ttft_s + expected.alone_s
    if ttft_s > limit_s:
        return Admission(False, stage, ttft_s - limit_s)
    if policy is AdmissionPolicy.BASELINE:
        return ACCEPTED
    room *= promised.max_load
    held: float = decoding if policy is AdmissionPolicy.EARLY else forecast.running_at(now + forecast.lead_s, now)
    if held + 1 > room:
        return Admission(False, RejectReason.DECODE_OVERLOAD, _until_room_s(held + 1 - room, room, forecast))
    return ACCEPTED


def admit_to_decode(
    policy: AdmissionPolicy, promised: ServiceClass, *, room: float, decoding: int, forecast: DecodeForecast
) -> Admission:
    """The check after prefill, which only the baseline makes: the others have moved it to the front."""
    room *= promised.max_load
    if policy is not AdmissionPolicy.BASELINE or not promised.promises or decoding + 1 <= room:
        return ACCEPTED
    wait_s = _until_room_s(decoding + 1 - room, room, forecast)
    return Admission(False, RejectReason.DECODE_OVERLOAD_AFTER_PREFILL, wait_s)


def _until_room_s(over: float, room: float, forecast: DecodeForecast) -> float:
    """`room` requests end at one in decode_s / room seconds."""
    return over * forecast.decode_s / max(1.0, room)


def spread_s(retry_after_s: float, tie: float) -> float:
    """When to tell a client to come again, by a `tie` in [0, 1) of its own."""
    return min(MOST_RETRY_S / (1.0 + SPREAD), retry_after_s) * (1.0 + SPREAD * tie)
