"""Asking anew what load sent home."""

import asyncio
from collections import Counter

import pytest

from tests.equality.sent_home import ATTEMPTS, Record, until_taken

pytestmark = [pytest.mark.slow, pytest.mark.dimensions()]


class Requests:
    """Their reasons, in turn; the last one stays."""

    def __init__(self, *reasons: str) -> None:
        self._reasons = list(reasons)
        self.events: list[str] = []
        self.sent_home: Counter[str] = Counter()

    async def ask(self, attempt: int) -> Record:
        self.events.append(f"ask {attempt}")
        return {"reason": self._reasons[min(attempt, len(self._reasons) - 1)]}

    async def calm(self) -> None:
        self.events.append("calm")

    def run(self) -> Record:
        return asyncio.run(until_taken(self.ask, self.calm, self.sent_home))


def test_what_takes_the_link_is_asked_once() -> None:
    requests = Requests("long")
    assert requests.run() == {"reason": "long"}
    assert (requests.events, requests.sent_home) == (["ask 0"], Counter())


def test_what_load_sends_home_is_counted_and_asked_anew_in_a_calm_system() -> None:
    requests = Requests("congested", "remote_queue", "long")
    assert requests.run() == {"reason": "long"}
    assert requests.events == ["ask 0", "calm", "ask 1", "calm", "ask 2"]
    assert requests.sent_home == {"congested": 1, "remote_queue": 1}


def test_another_reason_is_for_the_caller_to_judge() -> None:
    assert Requests("link_down", "long").run() == {"reason": "link_down"}


def test_a_system_that_sends_everything_home_proves_nothing() -> None:
    requests = Requests("congested")
    with pytest.raises(AssertionError, match="congested"):
        requests.run()
    assert requests.sent_home == {"congested": ATTEMPTS}
