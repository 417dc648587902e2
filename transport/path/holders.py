"""Places of callers that a certificate has admitted: many, and shared fairly by those who hold one.

    a newcomer           always finds a place
    one holder's places  its own oldest connection makes room, once it has `of_holder`
    all places           the oldest connection of the holder with the most makes room

So an operator with a connection or two is never shut out by gateways that open thousands.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, Self, TypeVar

Caller = TypeVar("Caller")

IN_ALL: Final = 4_096  # each takes some 60 KiB with TLS
OF_HOLDER: Final = 1_024  # a gateway has a few for each of its processes


class HolderPlaces(Generic[Caller]):
    """Which connections holders of certificates have."""

    def __init__(self, in_all: int = IN_ALL, of_holder: int = OF_HOLDER) -> None:
        self._in_all = in_all
        self._of_holder = of_holder
        self._holders: dict[Caller, str] = {}
        self._callers: dict[str, dict[Caller, None]] = {}  # by holder, the oldest first
        self._counts: Counter[str] = Counter()

    @classmethod
    def within(cls, descriptors: int) -> Self:
        """For a process with so many descriptors: half of them at most."""
        in_all = min(IN_ALL, descriptors // 2)
        return cls(in_all, min(OF_HOLDER, in_all // 4))

    def __len__(self) -> int:
        return len(self._holders)

    def enter(self, caller: Caller, holder: str) -> Caller | None:
        """Gives `caller` a place. Returns the caller that loses its own for it, if one does."""
        lost = self._who_loses(holder)
        if lost is not None:
            self.leave(lost)
        self._holders[caller] = holder
        self._callers.setdefault(holder, {})[caller] = None
        self._counts[holder] += 1
        return lost

    def leave(self, caller: Caller) -> None:
        """At the end of its connection, or later."""
        holder = self._holders.pop(caller, None)
        if holder is None:
            return
        del self._callers[holder][caller]
        self._counts[holder] -= 1
        if not self._counts[holder]:
            del self._callers[holder], self._counts[holder]

    def leave_if(self, has_left: Callable[[Caller], bool]) -> None:
        """All that have left give their places back."""
        for caller in [each for each in self._holders if has_left(each)]:
            self.leave(caller)

    def _who_loses(self, holder: str) -> Caller | None:
        if self._counts[holder] >= self._of_holder:
            return next(iter(self._callers[holder]))
        if len(self) < self._in_all:
            return None
        (largest, _), *_ = self._counts.most_common(1)
        return next(iter(self._callers[largest]))
