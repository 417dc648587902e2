"""Passive pools of unit-size blocks, for measuring policies on recorded block chains: nothing is pinned, nothing is computed.

`FlatPool` is the classic cache: every access of a block counts, wherever it lies. `ChainPool` adds what a prefix cache adds: a
block without its predecessors is worth nothing, so only blocks without cached successors may leave.
"""

from collections.abc import Hashable, Sequence

from hybrid_cache.eviction.base import EvictionPolicy, Use


class FlatPool:
    """Blocks in any combination. All of them are offered to the policy all the time."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.evictions = 0
        self._resident: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._resident

    def access(self, key: Hashable, now: float) -> bool:
        """Uses a block, storing it if need be; says whether it was there."""
        hit = key in self._resident
        if not hit:
            if len(self._resident) >= self.capacity:
                self._resident.remove(self.policy.pop_victim(now, key))
                self.evictions += 1
            self._resident.add(key)
        self.policy.touch(key, now)
        if not hit:
            self.policy.offer(key, now)
        return hit

    def request(self, use: Use) -> int:
        """One request: counts the leading cached blocks, then uses all of them, the last first. Returns the hits."""
        hits = leading(self._resident, use.path)
        self.policy.begin(use)
        for key in reversed(use.path):
            self.access(key, use.now)
        return hits


class ChainPool:
    """Blocks in chains; leaves leave first, so no block is ever cached without its predecessors."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.evictions = 0
        self._parent: dict[Hashable, Hashable | None] = {}
        self._children: dict[Hashable, int] = {}
        self._leaves = 0  # of them offered

    def __len__(self) -> int:
        return len(self._children)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._children

    def request(self, use: Use) -> int:
        """One request: counts the leading cached blocks and stores the others, as far as the policy wants them."""
        path, now = use.path, use.now
        hits = leading(self._children, path)
        self.policy.begin(use)
        # While it runs, a request's own blocks do not leave. The end of its cached part is the only one that may be a leaf.
        if hits and not self._children[path[hits - 1]]:
            self.policy.withdraw(path[hits - 1])
            self._leaves -= 1
        own = set(path[:hits])
        stored = hits
        while stored < len(path) and self._make_room(path[stored], own, now):
            self._add(path, stored)
            own.add(path[stored])
            stored += 1
        for key in reversed(path[:stored]):
            self.policy.touch(key, now)
        if stored and not self._children[path[stored - 1]]:
            self._offer(path[stored - 1], now)
        return hits

    def _make_room(self, incoming: Hashable, own: set[Hashable], now: float) -> bool:
        while len(self._children) >= self.capacity:
            if not self._leaves:
                return False
            victim = self.policy.pop_victim(now, incoming)
            if victim == incoming:
                return False
            self._leaves -= 1
            self._drop(victim, own, now)
        return True

    def _add(self, path: Sequence[Hashable], index: int) -> None:
        parent = path[index - 1] if index else None
        self._parent[path[index]] = parent
        self._children[path[index]] = 0
        if parent is not None:
            self._children[parent] += 1

    def _drop(self, key: Hashable, own: set[Hashable], now: float) -> None:
        del self._children[key]
        self.evictions += 1
        parent = self._parent.pop(key)
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent] and parent not in own:
            self._offer(parent, now)

    def _offer(self, key: Hashable, now: float) -> None:
        self._leaves += 1
        self.policy.offer(key, now)


def leading(resident: "set[Hashable] | dict[Hashable, int]", path: Sequence[Hashable]) -> int:
    """How many blocks at the head of a chain are cached."""
    return next((index for index, key in enumerate(path) if key not in resident), len(path))
