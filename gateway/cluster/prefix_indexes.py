"""What connected nodes have cached, in an index for each layout: another model may be served next."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from gateway.cluster.agent_values import NodeInfo
from hybrid_cache.cache.events import CacheEvent
from hybrid_cache.index.digest import DigestCleared, DigestEvent, DigestPart
from hybrid_cache.index.digests import DigestIndex
from hybrid_cache.index.index import Holding, PrefixIndex
from hybrid_cache.layout.layout import ModelLayout


class PrefixIndexes:
    """The indexes by the fingerprint of their layout."""

    def __init__(self) -> None:
        self._by_layout: dict[str, PrefixIndex] = {}
        self._digests: dict[str, DigestIndex] = {}  # of nodes far away, by layout

    def get(self, fingerprint: str) -> PrefixIndex | None:
        """None before a node with that layout has been heard of."""
        return self._by_layout.get(fingerprint)

    def layouts(self) -> dict[str, ModelLayout]:
        """All that are known, by fingerprint."""
        return {name: index.layout for name, index in self._by_layout.items()}

    def of(self, info: NodeInfo) -> PrefixIndex:
        """The index of a node's layout, begun at the first one. Raises LayoutError for a layout that cannot be read."""
        index = self._by_layout.get(info.layout_fingerprint)
        if index is None:
            index = self._by_layout[info.layout_fingerprint] = PrefixIndex(ModelLayout.from_json(info.layout_json))
        return index

    def _all(self) -> list[PrefixIndex | DigestIndex]:
        return [*self._by_layout.values(), *self._digests.values()]

    @property
    def num_names(self) -> int:
        """Short names that digests of nodes far away have."""
        return sum(map(len, self._digests.values()))

    @property
    def memory_bytes(self) -> int:
        """Of all of them; looked up block by block."""
        return sum(index.memory_bytes for index in self._all())

    def holdings(self, fingerprint: str, hashes: Sequence[bytes], num_tokens: int) -> dict[str, Holding]:
        """What each node of a layout probably has of a prompt."""
        found = self._by_layout[fingerprint].match_all(hashes, num_tokens)
        far = self._digests.get(fingerprint)
        return found | far.match_all(hashes, num_tokens) if far is not None else found

    def is_far(self, node_id: str) -> bool:
        """Whether a node says what it has by digests: then a hit on it may be none."""
        return any(node_id in index.nodes() for index in self._digests.values())

    def apply(self, info: NodeInfo, event: CacheEvent | DigestEvent) -> None:
        """Takes over what a node says of its cache."""
        if isinstance(event, DigestPart | DigestCleared):
            if (known := self._by_layout.get(info.layout_fingerprint)) is not None:
                self._digests.setdefault(info.layout_fingerprint, DigestIndex(known.layout)).apply(info.node_id, event)
            return
        if (index := self._by_layout.get(info.layout_fingerprint)) is not None:
            index.apply(info.node_id, event)

    def drop(self, node_id: str) -> None:
        """Forgets what a node had; `tidy` frees it."""
        for index in self._all():
            index.drop(node_id)

    async def tidy(self, used: Callable[[], Collection[str]]) -> None:
        """Takes what was dropped out of the indexes, in steps between which others have their turn.

        Then drops the indexes of layouts that are not `used`, once they are empty: a million blocks are not freed at once.
        """
        for index in self._all():
            while index.tidy():  # noqa: ASYNC110 nothing else does it
                await asyncio.sleep(0)
        had = used()
        self._by_layout = {name: index for name, index in self._by_layout.items() if name in had or len(index)}
        self._digests = {name: index for name, index in self._digests.items() if name in had or len(index)}
