"""Queues of waiting requests: one for each flow, each in the order of arrival."""

from collections import deque
from collections.abc import Callable, Iterator, KeysView
from itertools import chain, islice
from typing import Generic, TypeVar

Who = TypeVar("Who")


class Lines(Generic[Who]):
    """Flows are in the order in which they began to wait. Requests are compared by identity."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Who]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Who]:
        return chain.from_iterable(self._lines.values())

    @property
    def flows(self) -> KeysView[str]:
        """The flows with a waiting request."""
        return self._lines.keys()

    def add(self, flow: str, who: Who) -> None:
        """At the end of the flow's line."""
        self._lines.setdefault(flow, deque()).append(who)

    def ahead(self, flow: str, count: int) -> Iterator[Who]:
        """The first `count` of a flow's line."""
        return islice(self._lines.get(flow, ()), count)

    def take(self, flow: str, who: Who) -> None:
        """Removes `who` from the flow's line."""
        line = self._lines[flow]
        line.remove(who)
        if not line:
            del self._lines[flow]

    def keep(self, wanted: Callable[[Who], bool]) -> None:
        """Keeps the wanted ones, and removes all others."""
        kept = {flow: deque(filter(wanted, line)) for flow, line in self._lines.items()}
        self._lines = {flow: line for flow, line in kept.items() if line}

    def clear(self) -> None:
        """Removes all."""
        self._lines.clear()
