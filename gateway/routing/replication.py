"""Copies of hot prefixes inside a cluster: which requests want what is noted as they pass, copies are decided on a slow tick.

Decisions are `hybrid_cache.index.store`'s, over the prefill nodes of one cluster; `gateway.routing.prefix_transfers` carries
them out. A copy that has become cold is given up by command, once nothing waits for its node. The node knows better: what any
gateway's request has found there of late stays.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.prompt.prompt import Prompt
from gateway.routing.prefix_transfers import OK, PrefixTransfer, PrefixTransfers
from hybrid_cache.index.store import PrefixStore, Replicate, StoreConfig
from planner.decisions.views import Role

TICK_S: Final = 5.0
MAX_TRACKED: Final = 256  # prefixes per cluster whose demand is followed: a tick looks at each of them


class Replicas:
    """Follows demand and has hot prefixes copied."""

    def __init__(
        self,
        clusters: Clusters,
        moves: PrefixTransfers,
        clock: Callable[[], float],
        pays: Callable[[PrefixTransfer], bool] = lambda move: True,
    ) -> None:
        """`pays` says whether a copy is worth its way now."""
        self._clusters = clusters
        self._moves = moves
        self._clock = clock
        self._pays = pays
        self._stores: dict[tuple[str, str], PrefixStore] = {}  # by cluster and revision

    async def run(self) -> None:
        """Decides every TICK_S, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def wanted(self, prompt: Prompt, prefill_node: str) -> None:
        """A request for `prompt` is prefilled on that node."""
        info = self._clusters.by_id(prefill_node).info
        if info is not None and (store := self._store(info.cluster, prompt.revision)) is not None:
            loads = {node.id: _load(node) for node in self._prefills(info.cluster, prompt.revision)}
            store.get(prompt.hashes, prompt.transfer_tokens, loads, now=self._clock())

    def tick(self) -> None:
        """Starts the copies that demand and load call for now."""
        now = self._clock()
        self._stores = {key: store for key, store in self._stores.items() if key[1] in self._clusters.revisions}
        for cluster, revision in self._stores:
            store = self._store(cluster, revision)
            nodes = {node.id: node for node in self._prefills(cluster, revision)}
            if store is None or len(nodes) < 2:
                continue
            loads = {name: _load(node) for name, node in nodes.items()}
            for copy in store.cold(loads, now=now):
                node = nodes[copy.node_id]
                if not node.load.waiting:
                    store.dropped(copy)
                    self._moves.drop(node, copy.hashes, copy.keep_tokens, store.config.half_life_s)
            for decision in (*store.replicate(loads, now=now), *store.rebalance(loads, now=now)):
                self._copy(store, decision, nodes)

    def _copy(self, store: PrefixStore, decision: Replicate, nodes: Mapping[str, ClusterNode]) -> None:
        """In what requests leave: they move prefixes, too, and those are waited for."""
        num_tokens = decision.num_tokens
        move = PrefixTransfer(
            nodes[decision.source],
            nodes[decision.target],
            decision.hashes,
            num_tokens,
            store.index.layout.kv_bytes(num_tokens),
            decision.reason,
        )
        if len(self._moves):
            self._moves.left_out(move, "not_idle")
        elif not self._pays(move):
            self._moves.left_out(move, "not_worth_it")
        elif (task := self._moves.start(move)) is not None:
            task.add_done_callback(partial(self._moved, store, decision, store.held_tokens(decision)))

    def _moved(self, store: PrefixStore, decision: Replicate, keep_tokens: int, task: "asyncio.Task[str]") -> None:
        if not task.cancelled() and task.exception() is None and task.result() == OK:
            store.copied(decision, keep_tokens, now=self._clock())

    def _store(self, cluster: str, revision: str) -> PrefixStore | None:
        index = self._clusters.index_of(revision)
        if index is None:
            return None
        store = self._stores.get((cluster, revision))
        if store is None or store.index is not index:  # its nodes were all away
            store = self._stores[cluster, revision] = PrefixStore(index, StoreConfig(max_tracked=MAX_TRACKED))
        return store

    def _prefills(self, cluster: str, revision: str) -> list[ClusterNode]:
        return [node for node in self._clusters.ready(Role.PREFILL, revision) if node.cluster == cluster]


def _load(node: ClusterNode) -> float:
    return float(max(node.load.running + node.load.waiting, node.pending_requests))
