"""The live view of every node: who is ready, how busy, what it has cached, and how its links are.

One task per node reads its agent's event stream. The stream's life is the node's health: when it breaks, the node is
out and its prefixes are forgotten; when it is back, a snapshot rebuilds them, so a gateway that restarts knows
everything again. Nothing here is written down: nodes hold the truth, this is what the last event said.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from gateway.agent import AgentClient, NodeEvent, NodeInfo, NodeLoad
from gateway.errors import NodeError
from gateway.prompts import Hashing, Model, Prompt
from gateway.tasks import BACKOFF_S, TaskSet
from hybrid_cache.errors import CacheError
from hybrid_cache.events import CacheEvent
from hybrid_cache.hashing import model_salt
from hybrid_cache.index import PrefixIndex
from hybrid_cache.layout import ModelLayout
from planner.decisions.views import ClusterKind, LinkView, NodeView, Role

log = logging.getLogger("prfaas.gateway.clusters")

LOAD_INTERVAL_S: Final = 0.25
SILENCE_S: Final = 10.0  # a node that reports its load every quarter of a second has been dead for long
DEATH_NEWS_S: Final = 1.0  # an agent sees its engine end within milliseconds, unless it went with it
SUSPECT_S: Final = 2.0  # how long a node whose engine failed a leg is left alone; its agent knows better by then


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model all paired nodes run: equal layouts, so that the KVCache of one is the KVCache of the other."""

    name: str
    model_id: str
    layout: ModelLayout
    max_model_len: int
    hashing: Hashing

    def as_read(self) -> Model:
        """The model as reading a prompt sees it."""
        return Model(names=(self.name, self.model_id), max_model_len=self.max_model_len, hashing=self.hashing)


def salt_of(layout: ModelLayout, tenant: str = "") -> bytes:
    """What block hashes of prompts for a model start from; equal at every gateway. No gateway knows tenants yet: it is ""."""
    return model_salt(layout.fingerprint, tenant)


class Node:
    """One node, as its agent last described it, and the work that this gateway has under way on it."""

    def __init__(self, agent: AgentClient) -> None:
        self.agent = agent
        self.info: NodeInfo | None = None
        self.load = NodeLoad()
        self.connected = False
        self.suspect_until = float("-inf")
        self.pending_tokens = 0
        self.pending_requests = 0
        self.promised_bytes = 0.0  # KVCache that requests sent here for will send to another cluster

    def __repr__(self) -> str:
        return f"<Node {self.id} {self.role} {self.state}, {self.pending_requests} pending>"

    @property
    def id(self) -> str:
        return self.info.node_id if self.info else self.agent.address

    @property
    def role(self) -> str:
        return self.info.role if self.info else "unknown"

    @property
    def state(self) -> str:
        """The node's own state, or `down` while its agent does not answer."""
        return self.info.state if self.connected and self.info else "down"

    @property
    def engine(self) -> tuple[str, int]:
        """Which engine process this is: another value says that the one before is gone."""
        return (self.info.boot_id, self.info.engine_pid) if self.info else ("", 0)

    def is_ready(self, now: float) -> bool:
        """Whether new work may be sent here."""
        return self.state == "ready" and now >= self.suspect_until

    @contextmanager
    def busy_with(self, uncached_tokens: int, promised_bytes: float = 0.0) -> Iterator[None]:
        """Counts a request's work here from its routing on: the node's own report is a quarter of a second late."""
        self._pend(1, uncached_tokens, promised_bytes)
        try:
            yield
        finally:
            self._pend(-1, -uncached_tokens, -promised_bytes)

    def _pend(self, requests: int, tokens: int, promised_bytes: float) -> None:
        self.pending_requests += requests
        self.pending_tokens += tokens
        self.promised_bytes = self.promised_bytes + promised_bytes if self.pending_requests else 0.0


class Clusters:
    """All nodes. `start` begins to watch them, `close` ends it."""

    def __init__(
        self,
        agents: Collection[AgentClient],
        clock: Callable[[], float],
        *,
        served_model: str = "",
        decode_slots: int = 16,
        link_bytes_per_s: float = 0.0,
        tasks: TaskSet,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.nodes = [Node(agent) for agent in agents]
        self.served: ServedModel | None = None
        self._served_name = served_model
        self._decode_slots = decode_slots
        self._link_bytes_per_s = link_bytes_per_s
        self._clock = clock
        self._on_lost = on_lost
        self._index: PrefixIndex | None = None
        self._changed = asyncio.Event()
        self._tasks = tasks

    def start(self) -> None:
        for node in self.nodes:
            self._tasks.start(self._watch(node), "watch")

    async def close(self) -> None:
        await self._tasks.cancel()
        await asyncio.gather(*(node.agent.close() for node in self.nodes))

    # What decisions ask

    @property
    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        now = self._clock()
        return self.served is not None and any(
            node.role == Role.DECODE and self._serves(node) and node.is_ready(now) for node in self.nodes
        )

    @property
    def index(self) -> PrefixIndex | None:
        """What the nodes that serve the model have cached; None before one is known."""
        return self._index

    def by_id(self, node_id: str) -> Node:
        return next(node for node in self.nodes if node.id == node_id)

    def views(self, prompt: Prompt, exclude: Collection[str] = ()) -> list[NodeView]:
        """The nodes as routing sees them for `prompt`; nodes that cannot serve it are left out."""
        now = self._clock()
        return [
            self._view(node, prompt)
            for node in self.nodes
            if node.is_ready(now) and self._serves(node) and node.id not in exclude
        ]

    def links(self) -> list[LinkView]:
        """The egress from each PrfaaS cluster to each PD cluster, summed over the sending nodes.

        A link that no node has measured yet is taken to be up, its bandwidth what the configuration says, or unknown.
        """
        known = [node for node in self.nodes if node.info and node.connected]
        destinations = {node.info.cluster for node in known if node.info and node.info.cluster_kind == ClusterKind.PD}
        senders: dict[str, list[Node]] = defaultdict(list)
        for node in known:
            if node.info and node.info.cluster_kind == ClusterKind.PRFAAS:
                senders[node.info.cluster].append(node)
        return [
            _link(source, to, nodes, self._link_bytes_per_s)
            for source, nodes in senders.items()
            for to in sorted(destinations)
        ]

    async def has_died(self, node: Node, engine: tuple[str, int]) -> bool:
        """Whether the process that was the `engine` of `node` is gone; the news of it may take a moment."""

        def is_gone() -> bool:
            return node.state in ("down", "engine_down", "starting") or node.engine != engine

        return is_gone() or await self.wait_for(is_gone, DEATH_NEWS_S)

    def suspect(self, node: Node) -> None:
        """Leaves a node alone for a moment after it failed a request."""
        node.suspect_until = self._clock() + SUSPECT_S

    async def wait_for(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until something holds that nodes can change, such as `is_ready`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _serves(self, node: Node) -> bool:
        served, info = self.served, node.info
        return bool(served and info and info.layout_fingerprint == served.layout.fingerprint)

    def _view(self, node: Node, prompt: Prompt) -> NodeView:
        assert node.info is not None
        assert self._index is not None
        hit = self._index.match(node.id, prompt.hashes, prompt.transfer_tokens)
        movable = self._index.movable_tokens(node.id, prompt.hashes, hit)
        return NodeView(
            node_id=node.id,
            cluster=node.info.cluster,
            kind=ClusterKind(node.info.cluster_kind),
            role=Role(node.info.role),
            queued_tokens=max(node.load.queued_tokens, node.pending_tokens),
            running=max(node.load.running, node.pending_requests - node.load.waiting),
            waiting=node.load.waiting,
            max_running=self._decode_slots,
            cached_tokens=hit.num_tokens,
            attention_tokens=hit.attention_tokens,
            immovable_tokens=hit.num_tokens - movable,
        )

    # What events change

    async def _watch(self, node: Node) -> None:
        """Follows one node for ever: watch, and again after a pause that grows while nothing comes."""
        failures = 0
        while True:
            try:
                async with aclosing(node.agent.watch(LOAD_INTERVAL_S, SILENCE_S)) as events:
                    async for event in events:
                        self._apply(node, event)
                        failures = 0
            except (NodeError, CacheError, ValueError, KeyError) as error:
                if node.connected or not failures:
                    log.warning("node %s is down: %s", node.id, error)
                self._on_lost(error.reason if isinstance(error, NodeError) else "bad_event")
            except Exception as error:
                self._tasks.unforeseen("watch", error)
                self._on_lost("unforeseen")
            self._lost(node)
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    def _apply(self, node: Node, event: NodeEvent) -> None:
        match event:
            case NodeInfo():
                self._describe(node, event)
            case NodeLoad():
                node.load = event
            case _:
                self._cache_event(node, event)

    def _describe(self, node: Node, info: NodeInfo) -> None:
        _check(info, [other for other in self.nodes if other is not node])
        before = node.state
        node.info = info
        node.connected = True
        node.suspect_until = float("-inf")
        self._adopt_model(info)
        if node.state != before:
            log.info("node %s (%s of %s) is %s", node.id, info.role, info.cluster, node.state)
        self._changed.set()

    def _adopt_model(self, info: NodeInfo) -> None:
        """The first layout described is the one served, until no connected node has it any more."""
        if not info.layout_json:
            return
        if self.served is not None and info.layout_fingerprint != self.served.layout.fingerprint:
            if any(node.connected and self._serves(node) for node in self.nodes):
                log.warning("node %s has another layout than the model served; it is not used", info.node_id)
                return
            self.served = None
        layout = self.served.layout if self.served else ModelLayout.from_json(info.layout_json)
        if self._index is None or self._index.layout != layout:
            self._index = PrefixIndex(layout)
        self.served = ServedModel(
            name=self._served_name or info.model_id,
            model_id=info.model_id,
            layout=layout,
            max_model_len=self._max_model_len(layout) or info.max_model_len,
            hashing=Hashing(layout.block_size, salt_of(layout)),
        )

    def _max_model_len(self, layout: ModelLayout) -> int:
        """The longest context that every connected node of this layout takes; 0 without any."""
        peers = [node.info for node in self.nodes if node.connected and node.info]
        return min((p.max_model_len for p in peers if p.layout_fingerprint == layout.fingerprint), default=0)

    def _cache_event(self, node: Node, event: CacheEvent) -> None:
        if self._index is not None and self._serves(node):
            self._index.apply(node.id, event)

    def _lost(self, node: Node) -> None:
        node.connected = False
        node.load = NodeLoad()
        if self._index is not None:
            self._index.drop(node.id)
        if self.served is not None and (longest := self._max_model_len(self.served.layout)):
            self.served = replace(self.served, max_model_len=longest)
        self._changed.set()


def _check(info: NodeInfo, others: Collection[Node]) -> None:
    """Raises ValueError for a description that cannot be worked with; the node counts as down, and the log says why."""
    Role(info.role)
    ClusterKind(info.cluster_kind)
    if any(other.info is not None and other.info.node_id == info.node_id for other in others):
        raise ValueError(f"another node is called {info.node_id!r}, too")


def _link(source: str, destination: str, nodes: Collection[Node], unmeasured_bytes_per_s: float) -> LinkView:
    links = [link for node in nodes for link in node.load.links if link.peer == destination]
    budgets = [link.budget_bytes_per_s for link in links]
    queued = sum(link.queued_bytes for link in links)
    available = sum(link.available_bytes_per_s for link in links)
    # The senders share the line: the one that sees the longest queue is right about it.
    worst = max(links, key=lambda link: (link.congested, link.rtt_s - link.min_rtt_s), default=None)
    return LinkView(
        source=source,
        destination=destination,
        available_bytes_per_s=available or unmeasured_bytes_per_s or None,
        budget_bytes_per_s=sum(budgets) if all(budgets) else None,
        utilisation=max((link.utilisation for link in links), default=0.0),
        retransmit_ratio=max((link.retransmit_ratio for link in links), default=0.0),
        congested=worst is not None and worst.congested,
        rtt_s=worst.rtt_s if worst else 0.0,
        min_rtt_s=worst.min_rtt_s if worst else 0.0,
        estimate_error=max((link.estimate_error for link in links), default=0.0),
        queued_bytes=queued,
        # What is queued already was promised before.
        promised_bytes=max(0.0, sum(node.promised_bytes for node in nodes) - queued),
    )
