"""Prompts that a node is computing for this gateway: a prompt that goes on from one of them waits for it there.

A node's engine looks for a prefix when it is asked, not when it begins. So a prompt that is sent too early computes
again what is being computed in front of it. A decode node looks when it reserves: what is reserved too early is sent again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.decisions.routing.promises import Promises


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
        self.by_end: dict[
            bytes, list[InflightPrefill]
        ] = {}  # by their last hash; empty while nothing is that would be cached

    def __len__(self) -> int:
        return len(self._promises)

    def begin(self, hashes: Sequence[bytes]) -> InflightPrefill:
        computing = InflightPrefill(hashes)
        if hashes:
            self._promises.add(hashes)
            self.by_end.setdefault(hashes[-1], []).append(computing)
        return computing

    def end(self, computing: InflightPrefill) -> None:
        """To be called once for each."""
        computing.done.set()
        if not computing.hashes:
            return
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
