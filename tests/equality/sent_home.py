"""Prompts that load sends home prove nothing of the link: another one is asked instead, and they are counted."""

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from tests.e2e.beliefs import BY_LOAD
from tests.e2e.harness import Bench

ATTEMPTS: Final = 6
CALM_S: Final = 10.0

Record = Mapping[str, Any]


async def until_taken(
    ask: Callable[[int], Awaitable[Record]], calm: Callable[[], Awaitable[None]], sent_home: Counter[str]
) -> Record:
    """The record of the first request that load did not send home.

    `ask(attempt)` asks a prompt that was not asked before, and returns its record. `calm` returns when another one may
    take the link. `sent_home` counts by reason. Raises AssertionError when load sent each attempt home.
    """
    reasons: Counter[str] = Counter()
    for attempt in range(ATTEMPTS):
        if attempt:
            await calm()
        record = await ask(attempt)
        if record["reason"] not in BY_LOAD:
            return record
        reasons[record["reason"]] += 1
        sent_home[record["reason"]] += 1
    raise AssertionError(f"load sent each of {ATTEMPTS} prompts home: {dict(reasons)}")


async def calm(bench: Bench, num_tokens: int) -> None:
    """Until the gateway would send a prompt of that length over the link, or for CALM_S at most."""
    with contextlib.suppress(TimeoutError):
        await bench.until_link_takes(num_tokens, CALM_S)
