"""Decides where a cluster keeps its prefixes: which nodes get copies, and which drop them. The nodes move the bytes.

Mooncake's store (FAST'25 §3.2, §4.2) keeps hot blocks on several nodes, so that popular prefixes do not make one node
the bottleneck. A prefix is hot when more requests want it at once than its holders can serve; it is copied to the least
loaded node that has none. A node whose demand is far above its peers' hands prefixes over. The store remembers its
copies, even when it has forgotten the prefix's demand. It drops a copy that is cold, if another node has the prefix,
too.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hybrid_cache.cache.events import Medium
from hybrid_cache.cache.lookup import PrefixHit
from hybrid_cache.index.index import ANYWHERE, MOVABLE, PrefixIndex

# A remembered prefix: its entry, with the names of nodes that keep copies, and for each block a hash and a reference to it.
BYTES_PER_PREFIX: Final = 800
BYTES_PER_HASH: Final = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """`demand_per_replica`: concurrent requests that one holder of a prefix is good for."""

    demand_per_replica: float = 2.0
    max_replicas: int = 4
    half_life_s: float = 30.0
    min_tokens: int = 512  # a shorter prefix is computed sooner than copied
    imbalance: float = 2.0  # a node is hot when its load exceeds this many times the mean
    max_tracked: int = 100_000  # prefixes that were asked for
    max_tracked_bytes: int = 64 << 20  # of what is remembered of them, and of copies
    max_copies: int = 1024  # the oldest is forgotten, and left to its node's eviction

    def __post_init__(self) -> None:
        for name in (
            "demand_per_replica",
            "max_replicas",
            "half_life_s",
            "imbalance",
            "max_tracked",
            "max_tracked_bytes",
            "max_copies",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy the prefix of `num_tokens` tokens that ends with the last of `hashes` from a node to another."""

    source: str
    target: str
    hashes: tuple[bytes, ...]
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropReplica:
    """The prefix is cold: this copy is one too many. The node had `keep_tokens` of it before."""

    node_id: str
    hashes: tuple[bytes, ...]
    keep_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefixPlacement:
    """Where to `get` a prefix: the best holder and what it holds; None without a holder."""

    node_id: str | None
    hit: PrefixHit


@dataclass(slots=True)
class _Demand:
    hashes: tuple[bytes, ...]
    level: float
    at: float

    @property
    def size_bytes(self) -> int:
        return BYTES_PER_PREFIX + BYTES_PER_HASH * len(self.hashes)

    def decayed(self, now: float, half_life_s: float) -> float:
        halvings = max(0.0, now - self.at) / half_life_s
        return self.level * float(0.5**halvings)


@dataclass(frozen=True, slots=True)
class _Copy:
    hashes: tuple[bytes, ...]
    keep_tokens: int
    at: float

    @property
    def size_bytes(self) -> int:
        return BYTES_PER_PREFIX + BYTES_PER_HASH * len(self.hashes)


class PrefixStore:
    """put, get and replica decisions over a prefix index. Loads are the nodes' concurrent requests (any common unit)."""

    def __init__(self, index: PrefixIndex, config: StoreConfig | None = None) -> None:
        self.index = index
        self.config = config or StoreConfig()
        self._demand: OrderedDict[bytes, _Demand] = OrderedDict()  # by the last hash, the one asked for last at the end
        self._copies: OrderedDict[tuple[str, bytes], _Copy] = (
            OrderedDict()
        )  # by node and last hash, the newest at the end
        self.tracked_bytes = 0

    def get(
        self, hashes: Sequence[bytes], num_tokens: int, loads: Mapping[str, float], *, now: float
    ) -> PrefixPlacement:
        """The holder of the longest hit, the least loaded of equals. Counts as demand for that prefix."""
        hits = {node: self.index.match(node, hashes, num_tokens) for node in loads}
        best = min(loads, key=lambda node: (-hits[node].num_tokens, loads[node], node), default=None)
        if best is None or not hits[best].num_tokens:
            return PrefixPlacement(None, PrefixHit(0, 0))
        self._want(hashes, hits[best].num_tokens, now)
        return PrefixPlacement(best, hits[best])

    def put(self, loads: Mapping[str, float], free_pages: Mapping[str, int], num_pages: int) -> str | None:
        """The node that should take a new prefix of `num_pages`: room first, then load. None if no node has room."""
        roomy = [node for node in loads if free_pages.get(node, 0) >= num_pages]
        return min(roomy, key=lambda node: (loads[node], -free_pages[node], node), default=None)

    def replicate(self, loads: Mapping[str, float], *, now: float) -> list[Replicate]:
        """Copies for hot prefixes, hottest first: for each of them one at a time, until there are enough for its demand."""
        decisions: list[Replicate] = []
        levels = [(demand.decayed(now, self.config.half_life_s), demand) for demand in self._demand.values()]
        for level, demand in sorted(levels, key=lambda pair: -pair[0]):
            if level < self.config.demand_per_replica:
                break  # one holder is enough
            holders = self._holders(demand.hashes, loads)
            wanted = min(self.config.max_replicas, len(loads), max(1, round(level / self.config.demand_per_replica)))
            source = min(self._senders(demand.hashes, holders), key=lambda n: (loads[n], n), default=None)
            if wanted > len(holders) and source is not None:
                target = min((n for n in loads if n not in holders), key=lambda n: (loads[n], n))
                decisions.append(Replicate(source, target, demand.hashes, self._tokens(demand.hashes), "hot"))
        return decisions

    def held_tokens(self, decision: Replicate) -> int:
        """How much of the prefix the target has before it is sent the rest."""
        return self.index.match(decision.target, decision.hashes, decision.num_tokens).attention_tokens

    def copied(self, decision: Replicate, keep_tokens: int, *, now: float) -> None:
        """The prefix has been copied; its target had `keep_tokens` of it for itself."""
        key = decision.target, decision.hashes[-1]
        self._forget_copy(key)
        self._copies[key] = copy = _Copy(decision.hashes, keep_tokens, now)
        self.tracked_bytes += copy.size_bytes
        self._keep_limits()

    def cold(self, loads: Mapping[str, float], *, now: float) -> list[DropReplica]:
        """Copies that fewer requests want than their other holders are good for, the oldest first, one of each prefix.

        None that is younger than the demand's half-life. Copies that have left their node anyway are forgotten.
        """
        decisions: dict[bytes, DropReplica] = {}
        for (node, last), copy in list(self._copies.items()):
            if not self._holds(node, copy.hashes, ANYWHERE):
                self._forget_copy((node, last))
                continue
            if node not in loads or last in decisions or now - copy.at < self.config.half_life_s:
                continue
            others = len(self._holders(copy.hashes, loads)) - 1
            demand = self._demand.get(last)
            level = demand.decayed(now, self.config.half_life_s) if demand is not None else 0.0
            if others and level < self.config.demand_per_replica * others / 2:
                decisions[last] = DropReplica(node, copy.hashes, copy.keep_tokens)
        return list(decisions.values())

    def dropped(self, decision: DropReplica) -> None:
        """The drop is carried out: with any outcome, the store forgets the copy."""
        self._forget_copy((decision.node_id, decision.hashes[-1]))

    @property
    def num_copies(self) -> int:
        """Copies that are known."""
        return len(self._copies)

    def rebalance(self, loads: Mapping[str, float], *, now: float) -> list[Replicate]:
        """Copies the hottest prefix that only an overloaded node holds to the least loaded one."""
        if len(loads) < 2:
            return []
        mean = sum(loads.values()) / len(loads)
        hot = [node for node in loads if loads[node] > self.config.imbalance * mean]
        target = min(loads, key=lambda node: (loads[node], node))
        decisions: list[Replicate] = []
        for node in hot:
            demand = self._hottest_only_on(node, loads, now)
            if demand is not None and node != target:
                decisions.append(Replicate(node, target, demand.hashes, self._tokens(demand.hashes), "rebalance"))
        return decisions

    def _hottest_only_on(self, node: str, loads: Mapping[str, float], now: float) -> _Demand | None:
        for demand in sorted(self._demand.values(), key=lambda d: -d.decayed(now, self.config.half_life_s)):
            if self._holders(demand.hashes, loads) == [node] == self._senders(demand.hashes, [node]):
                return demand
        return None

    def _holders(self, hashes: Sequence[bytes], nodes: Iterable[str]) -> list[str]:
        """The `nodes` that have all of a prefix."""
        return [node for node in nodes if self._holds(node, hashes, ANYWHERE)]

    def _senders(self, hashes: Sequence[bytes], nodes: Iterable[str]) -> list[str]:
        """The nodes that can also send it to another one."""
        return [node for node in nodes if self._holds(node, hashes, MOVABLE)]

    def _holds(self, node: str, hashes: Sequence[bytes], media: Sequence[Medium]) -> bool:
        num_tokens = self._tokens(hashes)
        return self.index.match(node, hashes, num_tokens, media).num_tokens == num_tokens

    def _tokens(self, hashes: Sequence[bytes]) -> int:
        return len(hashes) * self.index.layout.block_size

    def _want(self, hashes: Sequence[bytes], num_tokens: int, now: float) -> None:
        if num_tokens < self.config.min_tokens:
            return
        prefix = tuple(hashes[: num_tokens // self.index.layout.block_size])
        demand = self._demand.get(prefix[-1])
        if demand is None:
            demand = self._demand[prefix[-1]] = _Demand(prefix, 0.0, now)
            self.tracked_bytes += demand.size_bytes
        demand.level, demand.at = demand.decayed(now, self.config.half_life_s) + 1.0, now
        self._demand.move_to_end(prefix[-1])
        self._keep_limits()

    def _keep_limits(self) -> None:
        limit = self.config.max_tracked_bytes
        while self._demand and (len(self._demand) > self.config.max_tracked or self.tracked_bytes > limit):
            self.tracked_bytes -= self._demand.popitem(last=False)[1].size_bytes
        while len(self._copies) > self.config.max_copies or (self._copies and self.tracked_bytes > limit):
            self._forget_copy(next(iter(self._copies)))

    def _forget_copy(self, key: tuple[str, bytes]) -> None:
        if (copy := self._copies.pop(key, None)) is not None:
            self.tracked_bytes -= copy.size_bytes
