"""What a fleet under churn is judged by, as values."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

MOST_OVER: Final = 0.02  # of a tenant's limit, over the whole run
REFUSALS: Final = frozenset({429, 503})  # said before anything was accepted


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """A node as a gateway shows it."""

    agent: str
    state: str


def differences(living: Mapping[str, str], seen: Mapping[str, NodeSeen]) -> list[str]:
    """What a gateway has wrong: living nodes by name and address, one line each.

    A node that was killed may be listed until its registry forgets it, and must not be ready.
    """
    wrong = []
    for name, agent in sorted(living.items()):
        found = seen.get(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif found.state != "ready":
            wrong.append(f"{name} is {found.state}")
        elif found.agent != agent:
            wrong.append(f"{name} is at {found.agent}, not {agent}")
    gone = (name for name, found in sorted(seen.items()) if found.state == "ready" and name not in living)
    return wrong + [f"{name} is ready, and not there" for name in gone]


def over_limit(let_in: int, seconds: float, per_minute: int, gateways: int) -> str:
    """Why a tenant was let in too often; empty if it was not.

    Both ends are moments at which nothing was left. What a gateway had refused until then may be there a moment later, so
    each has one request beside its part.
    """
    allowed = per_minute * seconds / 60.0
    if let_in <= (1.0 + MOST_OVER) * allowed + gateways:
        return ""
    return f"{let_in} requests in {seconds:.0f} s, of {allowed:.1f} that its limit allows"


def asked_too_little(asked: int, seconds: float, per_minute: int) -> str:
    """Why a run says nothing about a limit; empty if it does: more must be asked for than the limit allows."""
    allowed = per_minute * seconds / 60.0
    if asked >= (1.0 + MOST_OVER) * allowed:
        return ""
    return f"only {asked} requests were asked for in {seconds:.0f} s, of {allowed:.1f} that the limit allows"


def outcome_of(status: int, is_broken: bool) -> str:
    """What came of a request without a whole answer: it was refused, or lost after a gateway had accepted it.

    `status` 0: there was no answer at all. `is_broken`: the stream ended early.
    """
    if status in REFUSALS and not is_broken:
        return "refused"
    return "lost"


def grown(before: Mapping[int, int], now: Mapping[int, int], most: int, what: str) -> list[str]:
    """Processes that have more of something than when all was quiet the first time, one line each."""
    return [
        f"process {pid} has {count} {what}, and had {before[pid]}"
        for pid, count in sorted(now.items())
        if pid in before and count > before[pid] + most
    ]


def left(paths: Collection[str]) -> list[str]:
    """Names that should be gone."""
    return [f"{path} is left" for path in sorted(paths)]
