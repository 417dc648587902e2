"""Prompts that a node is computing for this gateway: a prompt that goes on from one of them waits for it there.

A node's engine looks for a prefix when it is asked, not when it begins. So a prompt that is sent too early computes
again what is being computed in front of it. A decode node looks when it reserves: what is reserved too early is sent again.

A node tells of the blocks of a prompt a moment after it has answered. Until then we keep the promise.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from planner.decisions.routing.promises import Promises

UNTOLD_S: Final = 0.25  # nodes collect what they tell for 0.1 s; the rest is for a network and a busy loop


@dataclass(frozen=True, slots=True, eq=False)
class InflightPrefill:
    """One prompt's computing, from the decision to its end, however that is."""

    hashes: Sequence[bytes]  # of its full blocks
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class InflightLanding:
    """One prompt's way to its decode node, from the decision to its end, however that is; times are the gateway's clock's."""

    hashes: Sequence[bytes]  # of its full blocks
    expected_at: float
    prefill_node: str  # by which it is computed
    over: asyncio.Event = field(default_factory=asyncio.Event)
    has_landed: bool = False


class InflightPrefixes:
    """What is being computed on one node."""

    def __init__(self) -> None:
        self._promises = Promises()
        self._untold: deque[tuple[float, InflightPrefill]] = deque()  # computed, and until when they are promised on
        self.by_end: dict[
            bytes, list[InflightPrefill]
        ] = {}  # by their last hash; empty while nothing is that would be cached

    def __len__(self) -> int:
        return sum(map(len, self.by_end.values())) - len(self._untold)

    def begin(self, hashes: Sequence[bytes]) -> InflightPrefill:
        computing = InflightPrefill(hashes)
        if hashes:
            self._promises.add(hashes)
            self.by_end.setdefault(hashes[-1], []).append(computing)
        return computing

    def end(self, computing: InflightPrefill) -> None:
        """It will not be computed. This or `computed` is to be called once for each."""
        computing.done.set()
        if computing.hashes:
            self._forget(computing)

    def computed(self, computing: InflightPrefill, now: float) -> None:
        """It has been computed."""
        computing.done.set()
        self.settle(now)
        if computing.hashes:
            self._untold.append((now + UNTOLD_S, computing))

    def settle(self, now: float) -> None:
        """Ends promises of prompts that were computed UNTOLD_S ago. Their nodes have reported the blocks by now."""
        while self._untold and self._untold[0][0] <= now:
            self._forget(self._untold.popleft()[1])

    def _forget(self, computing: InflightPrefill) -> None:
        self._promises.remove(computing.hashes)
        left = self.by_end[computing.hashes[-1]]
        left.remove(computing)
        if not left:
            del self.by_end[computing.hashes[-1]]

    def longest(self, hashes: Sequence[bytes], held: int) -> int:
        """Blocks of a prompt with these full blocks that will be there; `held` are already."""
        return self._promises.longest(hashes, held)

    def first(self, hashes: Sequence[bytes], blocks: int) -> InflightPrefill | None:
        """The node that will first have computed exactly the first `blocks` of these; None: no node does just now."""
        found = self.by_end.get(hashes[blocks - 1], ()) if 0 < blocks <= len(hashes) else ()
        return found[0] if found else None
