"""Addresses that show wrong keys: first they wait for the answer, then they are refused for a while.

    wrong keys   1 … free   free + 1 … refuse_after − 1      refuse_after, and from then on
    answer       401        401, later each time             429 for `refuse_s`, whatever key is shown

An address from which a right key has come is left alone: others than the guesser may have it, too.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.config.wrong_keys import WrongKeysConfig
from transport.path.site import site_of


@dataclass(slots=True)
class _Guesses:
    """Of one address."""

    count: int = 0
    last_at: float = 0.0
    refused_until: float = 0.0


class WrongKeys:
    """What is remembered of addresses. `now` is the event loop's clock."""

    def __init__(self, config: WrongKeysConfig, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        # Both in the order of the last sign of each.
        self._guesses: OrderedDict[str, _Guesses] = OrderedDict()
        self._good: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._guesses) + len(self._good)

    def is_good(self, address: str) -> bool:
        """Whether a right key has come from there within `good_s`."""
        return self._now() - self._good.get(site_of(address), float("-inf")) < self._config.good_s

    def refused_s(self, address: str) -> float:
        """For how long keys from there are refused still; 0: they are not."""
        guesses = self._guesses.get(site_of(address))
        return max(0.0, guesses.refused_until - self._now()) if guesses is not None else 0.0

    def right(self, address: str) -> None:
        """A right key has come from there."""
        site = site_of(address)
        self._guesses.pop(site, None)
        self._good[site] = self._now()
        self._good.move_to_end(site)
        if len(self._good) > self._config.max_addresses:
            self._good.popitem(last=False)

    def wrong(self, address: str) -> float:
        """A wrong key has come from there: how long its answer should wait."""
        if self.is_good(address):
            return 0.0
        guesses = self._of(site_of(address))
        if self._now() - guesses.last_at >= self._config.forget_s:
            guesses.count = 0
        guesses.count += 1
        guesses.last_at = self._now()
        beyond = guesses.count - self._config.free
        if guesses.count >= self._config.refuse_after:
            guesses.refused_until = self._now() + self._config.refuse_s
        if beyond <= 0:
            return 0.0
        delay_s = self._config.delay_s * float(1 << min(beyond - 1, 30))
        return min(self._config.max_delay_s, delay_s)

    def _of(self, site: str) -> _Guesses:
        guesses = self._guesses.setdefault(site, _Guesses(last_at=self._now()))
        self._guesses.move_to_end(site)
        if len(self._guesses) > self._config.max_addresses:
            self._guesses.popitem(last=False)
        return guesses
