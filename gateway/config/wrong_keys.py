"""`[gateway.wrong_keys]`: how often an address may show wrong keys."""

from dataclasses import dataclass, fields, replace
from typing import Self

from transport.control.settings import require


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongKeysConfig:
    """`[gateway.wrong_keys]`. An address may show `free` wrong keys. Further ones are answered after `delay_s`, each after
    twice as long as the one before, up to `max_delay_s`. Number `refuse_after` has all keys from there refused for `refuse_s`.

    An address that shows none for `forget_s` begins anew. One that has shown a right key within `good_s` is never refused.
    At most `max_addresses` are remembered, of IPv6 the first 64 bits.
    """

    free: int = 10
    delay_s: float = 0.25
    max_delay_s: float = 4.0
    refuse_after: int = 20
    refuse_s: float = 60.0
    forget_s: float = 600.0
    good_s: float = 3600.0
    max_addresses: int = 4096

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(value > 0, f"wrong_keys.{each.name}", value, "a number above 0")
        require(self.refuse_after > self.free, "wrong_keys.refuse_after", self.refuse_after, f"above free, {self.free}")

    def divided(self, workers: int) -> Self:
        """What each of so many workers lets an address do, to which connections come at random."""
        free = max(1, self.free // workers)
        return replace(self, free=free, refuse_after=max(free + 1, self.refuse_after // workers))
