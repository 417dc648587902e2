"""Decides what follows a failure: one table, for every stage that can fail on a node.

    stage      what was asked                      another node              without one, or when tries run out
    reserve    a decode node for a ticket          another decode node       full: this one, without a transfer
    prefill    an engine for a prompt's KVCache    same ticket, what has     the decode node computes the prompt itself
                                                   landed stays
    decode     an engine for the answer            new ticket                the request is refused
    stream     the rest of an answer               new ticket, from prompt   the stream ends with the error
                                                   and answer so far

A node that has left its role, or the system, since it was chosen has not failed: this does not count as an attempt. A failure
that every node would repeat is not retried. An engine that dies under a request may have died of it: such a request is tried
once more elsewhere, whatever the stage, and then refused.

Retries that a live node may still be working on are budgeted, as Finagle's and Envoy's are: they are a share of recent requests,
and a few more. So a sick system is not asked for twice its load. Retries after a lost node or link are counted, never refused.
A full node, or one that leaves, has done nothing for the request that it turns away: that retry is not counted. A retry costs
the budget the length of its prompt over the recent mean length.

The rest of a stream is asked of another node at most `max_takeovers` times. A takeover that adds fewer than `LEAST_PROGRESS`
tokens to the answer is one more try of the same work: it counts against `max_tries`, and the budget may refuse the next one. A
takeover that adds more has paid for itself: the next failure is the stream's first again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import exp
from types import MappingProxyType
from typing import Final

from planner.decisions.links.paths import PATH_FAILED

BUDGET_WINDOW_S: Final = 10.0  # Finagle's
LEAST_PROGRESS: Final = 16  # tokens of an answer
COSTS: Final = (0.25, 4.0)  # of one try, in requests: one long prompt does not spend what all others may need
TENANTS_PART: Final = "tenants_part"  # a node has room, but for others than this tenant
MAX_DEATHS: Final = 2  # a request under which that many engines have died is not carried to another one


class FailedStage(StrEnum):
    """The stage that failed on the node."""

    RESERVE = "reserve"
    PREFILL = "prefill"
    DECODE = "decode"
    STREAM = "stream"  # the client has had a part of the answer


class FailureKind(StrEnum):
    """The kind of failure."""

    UNREACHABLE = "unreachable"  # nothing listens there, or nothing answers
    LOST = "lost"  # the connection broke while the node worked on it
    DIED = "died"  # the same, and its engine is gone
    CUT = "cut"  # well, but what it sent did not arrive: the way from it is to be left alone
    TIMEOUT = "timeout"
    FULL = "full"  # well, but without room
    AWAY = "away"  # well, but about to leave its role or the system, or in another role already
    TROUBLE = "trouble"  # the node's own, which another may not have
    REQUEST = "request"  # the request's: every node would say the same


class Next(StrEnum):
    """The next step."""

    ELSEWHERE = "elsewhere"  # the same of another node
    ALONE = "alone"  # this decode node computes the prompt itself, nothing travels
    RECOMPUTE = "recompute"  # the decode node is told to stop waiting, and computes the prompt itself
    REFUSE = "refuse"  # the client is told


@dataclass(frozen=True, slots=True)
class RetryRule:
    """`otherwise` is done when no other node is left to try. `suspect`: new requests leave the node alone for a moment."""

    next: Next
    otherwise: Next
    suspect: bool = False
    is_over_budget: bool = False  # there might have been another try


RULES: Final[Mapping[tuple[FailedStage, FailureKind], RetryRule]] = MappingProxyType(
    {
        (FailedStage.RESERVE, FailureKind.UNREACHABLE): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.RESERVE, FailureKind.TIMEOUT): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.RESERVE, FailureKind.FULL): RetryRule(Next.ELSEWHERE, Next.ALONE),
        (FailedStage.RESERVE, FailureKind.AWAY): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.RESERVE, FailureKind.CUT): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.RESERVE, FailureKind.TROUBLE): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.RESERVE, FailureKind.REQUEST): RetryRule(Next.ALONE, Next.ALONE),
        (FailedStage.PREFILL, FailureKind.UNREACHABLE): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE, suspect=True),
        (FailedStage.PREFILL, FailureKind.LOST): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE, suspect=True),
        (FailedStage.PREFILL, FailureKind.DIED): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE, suspect=True),
        (FailedStage.PREFILL, FailureKind.TIMEOUT): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE),
        (FailedStage.PREFILL, FailureKind.FULL): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE),
        (FailedStage.PREFILL, FailureKind.AWAY): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE),
        (FailedStage.PREFILL, FailureKind.CUT): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE),
        (FailedStage.PREFILL, FailureKind.TROUBLE): RetryRule(Next.ELSEWHERE, Next.RECOMPUTE),
        (FailedStage.PREFILL, FailureKind.REQUEST): RetryRule(Next.RECOMPUTE, Next.RECOMPUTE),
        (FailedStage.DECODE, FailureKind.UNREACHABLE): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.DECODE, FailureKind.LOST): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.DECODE, FailureKind.DIED): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.DECODE, FailureKind.TIMEOUT): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.DECODE, FailureKind.FULL): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.DECODE, FailureKind.AWAY): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.DECODE, FailureKind.CUT): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.DECODE, FailureKind.TROUBLE): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.DECODE, FailureKind.REQUEST): RetryRule(Next.REFUSE, Next.REFUSE),
        (FailedStage.STREAM, FailureKind.UNREACHABLE): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.STREAM, FailureKind.LOST): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.STREAM, FailureKind.DIED): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.STREAM, FailureKind.TIMEOUT): RetryRule(Next.ELSEWHERE, Next.REFUSE, suspect=True),
        (FailedStage.STREAM, FailureKind.FULL): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.STREAM, FailureKind.AWAY): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.STREAM, FailureKind.CUT): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.STREAM, FailureKind.TROUBLE): RetryRule(Next.ELSEWHERE, Next.REFUSE),
        (FailedStage.STREAM, FailureKind.REQUEST): RetryRule(Next.REFUSE, Next.REFUSE),
    }
)

# Every engine would say the same: it reads other tokens than the gateway did; the request makes no sense to it; or
# (vLLM's) the prompt's KVCache is not that of its tokens alone. Only the decode node's own can go on.
SAME_EVERYWHERE: Final = frozenset(
    {"digest_mismatch", "layout_mismatch", "bad_request", "lora", "multimodal", "cache_salt", "prompt_embeds"}
)
_FAILURES: Final = MappingProxyType(
    {
        "unreachable": FailureKind.UNREACHABLE,
        "node_silent": FailureKind.UNREACHABLE,
        "connection_lost": FailureKind.LOST,
        "stream_broken": FailureKind.LOST,
        "stream_idle": FailureKind.TIMEOUT,
        "engine_died": FailureKind.DIED,
        PATH_FAILED: FailureKind.CUT,
        "timeout": FailureKind.TIMEOUT,
        "no_capacity": FailureKind.FULL,
        "queue_full": FailureKind.FULL,  # of an engine
        TENANTS_PART: FailureKind.FULL,
        "converting": FailureKind.AWAY,
        "wrong_role": FailureKind.AWAY,
        "draining": FailureKind.AWAY,
    }
)


def failure_of(reason: str) -> FailureKind:
    """The failure that a reason label names."""
    if reason in SAME_EVERYWHERE:
        return FailureKind.REQUEST
    return _FAILURES.get(reason, FailureKind.TROUBLE)


# What a server says whose engine has died under it, before it ends, too (vLLM's): that, not that the connection broke.
_LAMENTS: Final = frozenset({"500", "bad_answer", "stream_error"})


def may_have_died(reason: str) -> bool:
    """Whether an engine that failed for that may have died of it: then who watches it knows."""
    return failure_of(reason) is FailureKind.LOST or reason in _LAMENTS


def tries_of(failures: Iterable[FailureKind]) -> int:
    """The number of tries that count: an absent node has tried nothing."""
    return sum(failure is not FailureKind.AWAY for failure in failures)


def rule_after(stage: FailedStage, failure: FailureKind, *, tries: int, max_tries: int, deaths: int) -> RetryRule:
    """What follows the failure of try number `tries`, if `deaths` engines have died under the request by now."""
    rule = RULES[stage, failure]
    if deaths >= MAX_DEATHS:
        return RetryRule(Next.REFUSE, Next.REFUSE, rule.suspect)
    if rule.next is Next.ELSEWHERE and tries >= max_tries:
        return RetryRule(rule.otherwise, rule.otherwise, rule.suspect)
    return rule


NOTHING_DONE: Final = frozenset({FailureKind.UNREACHABLE, FailureKind.FULL, FailureKind.AWAY})
REPEATING: Final = frozenset(
    {FailureKind.LOST, FailureKind.TIMEOUT, FailureKind.TROUBLE}
)  # what was done is done again


def adds_enough(answered: int, answered_before: int) -> bool:
    """Whether a stream has gone on far enough since its last takeover for its next failure to count as the first."""
    return answered - answered_before >= LEAST_PROGRESS


class RetryBudget:
    """Tries again of late, beside requests of late: both fade with a time constant of `BUDGET_WINDOW_S`.

    At most `share` of a request's worth of tries for each request, and `least` more. `now` never goes back.
    """

    def __init__(self, share: float, least: float) -> None:
        self._share = share
        self._least = least
        self._requests = self._tokens = self._tries = self._at = 0.0

    def request(self, now: float, tokens: int = 1) -> None:
        """A request with a prompt of so many tokens begins."""
        self._fade(now)
        self._requests += 1.0
        self._tokens += tokens

    def rule_after(
        self,
        now: float,
        stage: FailedStage,
        failure: FailureKind,
        *,
        tries: int,
        max_tries: int,
        deaths: int,
        tokens: int = 1,
    ) -> RetryRule:
        """As the function of that name; another try of so many tokens is counted, or is not to be."""
        rule = rule_after(stage, failure, tries=tries, max_tries=max_tries, deaths=deaths)
        if rule.next is not Next.ELSEWHERE or failure is FailureKind.AWAY or failure is FailureKind.FULL:
            return rule
        self._fade(now)
        is_first_takeover = stage is FailedStage.STREAM and tries <= 1  # a client must not notice the failure before it
        is_bound = failure in REPEATING and not is_first_takeover
        if is_bound and self._tries + 0.5 > self._least + self._share * self._requests:  # to the nearest whole try
            return replace(rule, next=rule.otherwise, is_over_budget=True)
        self._tries += self._cost(tokens)
        return rule

    def _cost(self, tokens: int) -> float:
        """The cost of a try, in requests of the recent mean length."""
        if not self._tokens:
            return 1.0
        cheapest, dearest = COSTS
        return min(dearest, max(cheapest, tokens * self._requests / self._tokens))

    def _fade(self, now: float) -> None:
        kept = exp((self._at - now) / BUDGET_WINDOW_S) if now > self._at else 1.0
        self._requests, self._tokens, self._tries = self._requests * kept, self._tokens * kept, self._tries * kept
        self._at = max(now, self._at)
