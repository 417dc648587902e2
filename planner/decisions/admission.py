"""Whom to turn away: Mooncake's overload-oriented scheduling (§4.3), as decisions on predicted SLO violations.

The load of a stage is what it is predicted to give, over what the SLO allows; above 1 a request is refused. The policies
differ in which decode load they look at, and when:

    accept_all   never refuses
    baseline     prefill load at arrival; decode load only once the prefill is done, when its work is lost
    early        both loads as they are at arrival: the decode load is out of date by one prefill time, so it swings
    prediction   the decode load as it will be when this prefill ends
"""

from bisect import bisect_right, insort
from dataclasses import dataclass
from enum import StrEnum
from math import exp
from typing import Final

BELIEVED_TURNS: Final = 3
TURNS_REMEMBERED: Final = 8


class AdmissionPolicy(StrEnum):
    """When a request may be refused."""

    ACCEPT_ALL = "accept_all"
    BASELINE = "baseline"
    EARLY = "early"
    PREDICTION = "prediction"


class RejectReason(StrEnum):
    """Why a request was refused; also the label under which rejects are counted."""

    PREFILL_OVERLOAD = "prefill_overload"
    DECODE_OVERLOAD = "decode_overload"
    DECODE_OVERLOAD_AFTER_PREFILL = "decode_overload_after_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What the SLOs allow. `decode_requests`: the most requests at once, over all decode nodes, that keep TBT in the SLO."""

    ttft_s: float
    decode_requests: float
    max_load: float = 1.0

    def __post_init__(self) -> None:
        if self.ttft_s <= 0 or self.decode_requests <= 0 or self.max_load <= 0:
            raise ValueError(f"{self}: limits must be above 0")


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision. `retry_after_s` is when the stage that refused is predicted to be within its SLO again."""

    accepted: bool
    reason: RejectReason | None = None
    retry_after_s: float = 0.0


ACCEPTED = Admission(True)


class DecodeForecast:
    """How many requests decode will hold at a later time: Mooncake's system-level prediction (§4.3.4), made memoryless.

    Mooncake takes every request to decode for the same time. Answers differ in length, though: some that have run that long
    go on, and counting them out makes room that is not there. So a running request is taken to end at the mean rate, and
    one whose prefill is under way joins when that is predicted to end.
    """

    def __init__(self, decode_s: float) -> None:
        self.decode_s = decode_s
        self.lead_s = 0.0
        self.running = 0
        self._joining: list[float] = []

    def on_accepted(self, decode_start: float, now: float) -> None:
        """A request will start to decode at about `decode_start`."""
        insort(self._joining, decode_start)
        self.lead_s += 0.05 * (decode_start - now - self.lead_s)

    def on_started(self, predicted: float) -> None:
        """The request that was predicted to start at `predicted` has started now."""
        self.on_dropped(predicted)
        self.running += 1

    def on_ended(self, started: float, now: float) -> None:
        """A request that started at `started` is done."""
        self.running -= 1
        self.decode_s += 0.05 * (now - started - self.decode_s)

    def on_dropped(self, predicted: float) -> None:
        """A request that was to start at `predicted` will not."""
        at = bisect_right(self._joining, predicted) - 1
        assert self._joining[at] == predicted
        del self._joining[at]

    def running_at(self, time: float, now: float) -> float:
        """Requests expected to decode at `time`; those overdue are taken to join now."""
        stays = exp((now - time) / self.decode_s) * self.running
        for start in self._joining[: bisect_right(self._joining, time)]:
            stays += exp((max(start, now) - time) / self.decode_s)
        return stays


class Drain:
    """How fast a line moves: the mean time between two of its turns, lately. Of a line that has not moved yet it is a guess."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self.interval_s = interval_s
        self.turns = 0
        self._last = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it is more than a guess: nobody is turned away for one."""
        return self.turns >= BELIEVED_TURNS

    def on_line(self, now: float) -> None:
        """Somebody has begun to wait where nobody did: what went before was no line."""
        self._last = now

    def on_turn(self, now: float) -> None:
        """The first of the line has got what it waited for."""
        self.turns += 1
        self.interval_s += (max(0.0, now - self._last) - self.interval_s) / min(self.turns, TURNS_REMEMBERED)
        self._last = now

    def wait_s(self, ahead: int) -> float:
        """Predicted time until somebody has a turn whom `ahead` others come before."""
        return (ahead + 1) * self.interval_s


def admit(
    policy: AdmissionPolicy,
    limits: AdmissionLimits,
    *,
    ttft_s: float,
    decoding: int,
    forecast: DecodeForecast,
    now: float,
) -> Admission:
    """Whether to take a request that would see its first token after `ttft_s`, with `decoding` requests in decode now."""
    if policy is AdmissionPolicy.ACCEPT_ALL:
        return ACCEPTED
    if ttft_s > limits.ttft_s * limits.max_load:
        return Admission(False, RejectReason.PREFILL_OVERLOAD, ttft_s - limits.ttft_s * limits.max_load)
    if policy is AdmissionPolicy.BASELINE:
        return ACCEPTED
    held: float = decoding if policy is AdmissionPolicy.EARLY else forecast.running_at(now + forecast.lead_s, now)
    if held + 1 > limits.decode_requests * limits.max_load:
        return Admission(False, RejectReason.DECODE_OVERLOAD, forecast.decode_s / max(1.0, limits.decode_requests))
    return ACCEPTED


def admit_to_decode(policy: AdmissionPolicy, limits: AdmissionLimits, decoding: int) -> Admission:
    """The check after prefill, which only the baseline makes: the others have moved it to the front."""
    if policy is not AdmissionPolicy.BASELINE or decoding + 1 <= limits.decode_requests * limits.max_load:
        return ACCEPTED
    return Admission(False, RejectReason.DECODE_OVERLOAD_AFTER_PREFILL)
