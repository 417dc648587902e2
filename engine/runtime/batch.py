"""Sequences that decode together. A batch makes one step at a time; its duration depends on their number."""

import math
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

NEARLY: Final = 1e-6  # of a step: a timer that is early by less has not been early


class DecodeBatch(Generic[Key]):
    """Computes when each sequence has its next token. Pure: `now` is given, in seconds, and never goes back. Its own
    time is the number of steps made, with fractions: a sequence that joins at step 3.2 takes part from step 4 on, and
    has its first token at 5.
    """

    def __init__(self, step_s: Callable[[int], float]) -> None:
        """`step_s(b)`: seconds of a step with b sequences, above 0."""
        self._step_s = step_s
        self._due: dict[Key, float] = {}  # the step after which a sequence has its next token
        self._steps = 0.0
        self._now = 0.0
        self._held = False

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: object) -> bool:
        return key in self._due

    @property
    def members(self) -> list[Key]:
        return list(self._due)

    def join(self, now: float, key: Key) -> None:
        """Its first token comes after one whole step."""
        self._advance(now)
        if not self._due:
            self._steps = 0.0  # no request is in the middle of a step, and a float that grows for ever loses its digits
        self._due[key] = math.ceil(self._steps - NEARLY) + 1.0

    def go_on(self, key: Key, steps: float) -> None:
        """The next token of `key` comes `steps` after the one before, however late that was fetched."""
        self._due[key] += steps

    def leave(self, now: float, key: Key) -> None:
        self._advance(now)
        del self._due[key]

    def hold(self, now: float, *, held: bool) -> None:
        """Pauses while `held`: the processors compute a prompt."""
        self._advance(now)
        self._held = held

    def due(self, now: float) -> list[Key]:
        """The sequences that already have a token."""
        self._advance(now)
        return [key for key, step in self._due.items() if step <= self._steps + NEARLY]

    def due_at(self) -> float:
        """When the next token will be there, if nothing changes; inf: never."""
        if self._held or not self._due:
            return math.inf
        return self._now + max(0.0, min(self._due.values()) - self._steps) * self._step_s(len(self._due))

    def _advance(self, now: float) -> None:
        if self._due and not self._held:
            self._steps += max(0.0, now - self._now) / self._step_s(len(self._due))
        self._now = max(self._now, now)
