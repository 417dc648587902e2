"""The interface between the cache and an eviction policy."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

Key = Hashable

BEGIN_STEP: Final = 4096  # blocks of a path that a policy looks at in one go: a millisecond or two


class Use(NamedTuple):
    """One request's use of the cache: the keys of its blocks from the root on, and what kind of request it is.

    Blocks after the first `useful` are not expected to be used again; None: unknown.
    """

    now: float
    path: Sequence[Key]
    category: str = ""
    useful: int | None = None


class EvictionPolicy(Protocol):
    """Orders the items that may leave. A key names an item. The cache offers only items without holders and without
    dependants. So under any policy children leave before their parents, and an item in use never leaves.
    """

    def begin(self, use: Use) -> None:
        """A request arrives; the touches of its blocks follow, perhaps later."""
        ...

    def begin_steps(self, use: Use) -> Iterator[None]:
        """`begin` in steps, between which anything else may happen but another `begin`."""
        self.begin(use)
        yield

    def touch(self, key: Key, now: float) -> None:
        """The item was stored or used. Within a prompt the tail is touched first."""
        ...

    def touch_path(self, keys: Sequence[Key], now: float) -> None:
        """`touch` for the blocks of a prompt, tail first; none of them is offered."""
        for key in keys:
            self.touch(key, now)

    def offer(self, key: Key, now: float) -> None:
        """The item may leave from now on."""
        ...

    def take_path(self, keys: Sequence[Key], now: float) -> int:
        """Takes the first of `keys` that `pop_victim` would take next, if each was offered once the one before it has left;
        returns how many. Mostly a victim's ancestors are the next victims.
        """
        return 0

    def withdraw(self, key: Key) -> None:
        """The item is in use again; it may not have been offered."""
        ...

    def forget(self, key: Key) -> None:
        """The item has left the cache without having been a victim."""
        ...

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        """Takes the item that should leave first out of the offered ones; there is at least one.

        `incoming` is what needs the room, where the caller knows it.
        """
        ...
