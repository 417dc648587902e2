"""Requests for whose KVCache no decode node has room now: they wait in line, before anything is reserved or computed for them.

Whoever is first asks again when somebody's room has become free, or after a moment, since other gateways' requests end, too.
The line is as long as it may be, and nobody stands in it who would not get through in time: those are told when to come again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from gateway.errors import Overloaded
from planner.decisions.admission import Drain

ASK_AGAIN_S: Final = 0.25


class WaitingLine:
    """First come, first served. At most `limit` wait, each for `patience_s` in all."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        limit: int,
        patience_s: float,
        on_change: Callable[[int], None] = lambda length: None,
    ) -> None:
        self.limit = limit
        self.patience_s = patience_s
        self.drain = Drain()
        self._clock = clock
        self._on_change = on_change
        self._places: deque[Place] = deque()
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """For one request; it stands in the line from its first `wait` on, until it leaves or the block ends."""
        place = Place(self)
        try:
            yield place
        finally:
            self._leave(place)

    def freed(self) -> None:
        """A request has ended: whoever is first may ask again."""
        self._freed.set()

    def _join(self, place: "Place") -> None:
        expected_s = self.drain.wait_s(len(self))
        if len(self) >= self.limit or (self.drain.is_known and expected_s > self.patience_s):
            raise self._refusal(expected_s)
        if not self._places:
            self.drain.on_line(self._clock())
        self._places.append(place)
        self._on_change(len(self))

    def _leave(self, place: "Place") -> None:
        if place in self._places:
            self._places.remove(place)
            self._on_change(len(self))
            self._freed.set()  # there may be room for one more
            if self._places:
                self._places[0].is_first.set()

    async def _turn(self, place: "Place", deadline: float) -> None:
        """Until `place` is the first and may ask again."""
        try:
            async with asyncio.timeout(deadline - self._clock()):
                while self._places[0] is not place:
                    place.is_first.clear()
                    await place.is_first.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout(ASK_AGAIN_S):
                        await self._freed.wait()
                self._freed.clear()
        except TimeoutError:
            self._leave(place)
            raise self._refusal(self.drain.wait_s(len(self))) from None

    def _refusal(self, retry_after_s: float) -> Overloaded:
        return Overloaded(
            f"No decode node has room and {len(self)} requests wait for it. Please retry.",
            "no_room",
            retry_after_s=retry_after_s,
        )


class Place:
    """One request's place."""

    def __init__(self, line: WaitingLine) -> None:
        self.is_first = asyncio.Event()
        self._line = line
        self._deadline: float | None = None

    @property
    def stands(self) -> bool:
        """Whether it is in the line."""
        return self in self._line._places

    async def wait(self) -> None:
        """Until it is this request's turn to ask for room. Raises Overloaded, with the time after which to come again."""
        line = self._line
        if self._deadline is None:
            line._join(self)
            self._deadline = line._clock() + line.patience_s
        await line._turn(self, self._deadline)

    def served(self) -> None:
        """It has got its room."""
        line = self._line
        if self.stands:
            line.drain.on_turn(line._clock())
            line._leave(self)
