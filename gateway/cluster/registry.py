"""The live view of every node: whether it is ready, how busy it is, what it has cached, and how its links are.

One task per node reads its agent's event stream. The stream's life is the node's health: when it breaks, the node is
out and its prefixes are forgotten; when it is back, a snapshot rebuilds them, so a gateway that restarts knows
everything again. Nothing here is written down: nodes hold the truth, this is what the last event said.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from gateway.cluster.agent_client import RENEWED, AgentClient
from gateway.cluster.agent_values import SILENT, NodeEvent, NodeInfo, NodeLoad
from gateway.cluster.node import NO_LANDING, ClusterNode
from gateway.cluster.pinned_prefixes import PinnedPrefix
from gateway.cluster.prefix_indexes import PrefixIndexes
from gateway.cluster.served_model import (
    ServedModel,
    ServedModels,
)
from gateway.config.models import ModelCatalog
from gateway.errors import AgentCallFailed
from gateway.prompt.prompt import Prompt
from gateway.tasks import BACKOFF_S, TaskSet
from hybrid_cache.errors import CacheError
from hybrid_cache.hashing.name_secrets import UNKEYED, NameSecrets
from hybrid_cache.index.index import NOTHING, PrefixIndex
from planner.decisions.routing.offload import ReadyNodes
from planner.decisions.views import ClusterKind, NodeView, Role

log = logging.getLogger("prfaas.gateway.clusters")

LOAD_INTERVAL_S: Final = 0.25
SILENCE_S: Final = 10.0  # a node that reports its load every quarter of a second has been dead for long
QUIET_S: Final = 5.0  # that an engine has said nothing, when its agent has not for longer: as good as gone
STILL_S: Final = 1.0  # of one that is silent by its agent's word: of several servers of one engine others may go on
DEATH_NEWS_S: Final = 1.0  # an agent sees its engine end within milliseconds, unless it went with it
_Named = list[tuple[str, ClusterNode]]  # nodes by their names, which take a moment to ask for
_Serving = tuple[dict[str, _Named], _Named]
LINGER_S: Final = 5.0  # after the last request of a node that has left, for calls that free what it held
REMEMBER_S: Final = 600.0  # what was learned of a node that has left
SUSPECT_S: Final = 2.0  # how long a node whose engine failed a leg is left alone; its agent knows better by then


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """How long a node is left alone, the news of a death is waited for, and an engine may be quiet beside a silent agent.

    A node that has left is spoken to for `linger_s` after its last request, and remembered for `remember_s`.
    """

    suspect_s: float = SUSPECT_S
    death_news_s: float = DEATH_NEWS_S
    quiet_s: float = QUIET_S
    linger_s: float = LINGER_S
    remember_s: float = REMEMBER_S


NODE_TIMES: Final = NodeTimes()
ONE_MODEL: Final = ModelCatalog()


class Clusters:
    """All nodes. `start` begins to watch them, `close` ends it."""

    def __init__(
        self,
        agents: Collection[AgentClient],
        clock: Callable[[], float],
        *,
        catalog: ModelCatalog = ONE_MODEL,
        decode_slots: int = 16,
        tasks: TaskSet,
        on_lost: Callable[[str], None] = lambda reason: None,
        on_silent: Callable[[str, float], None] = lambda engine_url, quiet_s: None,
        on_renamed: Callable[[str], None] = lambda node_id: None,
        catch_up: Callable[[Sequence[ClusterNode]], None] = lambda nodes: None,
        times: NodeTimes = NODE_TIMES,
        secrets: NameSecrets = UNKEYED,
    ) -> None:
        """`on_silent` is told whose engine says nothing: what waits for it and has heard nothing for `quiet_s` need wait no more.

        `catch_up` is called before nodes are looked at: what other workers have under way on them is to be seen, too.
        `catalog` says which model a node is of; other nodes are not used.
        """
        # Changed in place: links and others look at the same list.
        self.nodes = [ClusterNode(agent) for agent in agents]
        self.all_served = ServedModels(catalog)
        # Of these, what decisions ask: by key, the default one once a node has it; all revisions.
        self.models: Mapping[str, ServedModel] = {}
        self.served: ServedModel | None = None
        self.revisions: Mapping[str, ServedModel] = {}
        self._decode_slots = decode_slots
        self._clock = clock
        self._on_lost = on_lost
        self._on_silent = on_silent
        self._on_renamed = on_renamed
        self._catch_up = catch_up
        self._times = times
        self.secrets = secrets
        self._by_id: dict[str, ClusterNode] = {}
        self.indexes = PrefixIndexes()
        self._changed = asyncio.Event()
        # By revision, those that say that they are ready: prefill nodes by cluster, decode nodes; None: to be looked up again.
        self._serving: dict[str, _Serving] | None = None
        self._tasks = tasks
        self._watches: dict[ClusterNode, asyncio.Task[None]] | None = None  # None before the start
        # That no decision sees any more, and that have work under way, or had a moment ago.
        self.retired: set[ClusterNode] = set()
        self._successors: dict[ClusterNode, ClusterNode] = {}  # that have not been heard of at their new addresses

    def start(self) -> None:
        self._watches = {}
        for node in self.nodes:
            self._begin(node)

    async def close(self) -> None:
        await self._tasks.cancel()
        everyone = {*self.nodes, *self.retired, *self._successors.values()}
        await asyncio.gather(*(node.agent.close() for node in everyone))

    # Who comes and goes

    def join(self, node: ClusterNode) -> None:
        """One more node, watched from now on."""
        self.nodes.append(node)
        self._begin(node)

    def leave(self, node: ClusterNode) -> None:
        """No decision sees this node any more. It is watched, and can be spoken to, until `end`."""
        self._take_over(node)
        self.nodes.remove(node)
        self._retire(node)

    def move(self, node: ClusterNode, successor: ClusterNode) -> None:
        """The same node at another address. It takes over as soon as it answers there, or the one before is lost."""
        before = _predecessor(self._successors, node)
        if before is not None:  # it moves again, and was never heard of meanwhile
            self.retired.add(node)
            node = before
        self._successors[node] = successor
        self._begin(successor)
        if not node.connected:
            self._take_over(successor)

    async def end(self, node: ClusterNode) -> None:
        """Lets go of a node that has left: it is not spoken to any more."""
        self.retired.discard(node)
        if (watch := (self._watches or {}).pop(node, None)) is not None:
            watch.cancel()
            await asyncio.wait([watch])
        await node.agent.close()

    def _begin(self, node: ClusterNode) -> None:
        if self._watches is not None:
            self._watches[node] = self._tasks.start(self._watch(node), "watch")

    def _take_over(self, successor: ClusterNode) -> None:
        """Has a node take the place of the one that it follows, if it has not yet."""
        if (before := _predecessor(self._successors, successor)) is not None:
            del self._successors[before]
            self.nodes[self.nodes.index(before)] = successor
            self._retire(before)

    def _retire(self, node: ClusterNode) -> None:
        self.retired.add(node)
        if self._by_id.get(node.id) is node:  # else what is known by its name is another node's
            del self._by_id[node.id]
            self.indexes.drop(node.id)
        self._serve()

    # What decisions ask

    @property
    def is_ready(self) -> bool:
        """Whether a request to some model could be served now."""
        return any(is_ready(self, served) for served in self.revisions.values())

    def index_of(self, revision: str) -> PrefixIndex | None:
        """What the nodes of a revision have cached; None before one is known."""
        served = self.revisions.get(revision)
        return self.indexes.get(served.layout.fingerprint) if served is not None else None

    @property
    def index(self) -> PrefixIndex | None:
        """That of the revision that stands for the default model."""
        return self.index_of(self.served.revision) if self.served is not None else None

    def follow(self, catalog: ModelCatalog) -> None:
        """Its models are served from now on, by the nodes that it says."""
        if catalog != self.all_served.catalog:
            self.all_served = replace(self.all_served, catalog=catalog)
            self._serve()

    def rename(self, secrets: NameSecrets) -> None:
        """Names blocks by these from now on."""
        self.secrets = secrets
        self._serve()

    def by_id(self, node_id: str, revision: str = "") -> ClusterNode:
        """The node that bears this name, and is of that revision or, without one, of any.

        Raises AgentCallFailed: since a decision, its address may have got another name, or another model.
        """
        if (node := self._by_id.get(node_id)) is None:
            raise AgentCallFailed(node_id, "gone", "its agent now has another node_id")
        if revision and node.revision != revision:
            raise AgentCallFailed(node_id, "gone", "it is of another revision of the model now")
        return node

    def views(self, prompt: Prompt, exclude: Collection[str] = ()) -> ReadyNodes:
        """The nodes of its revision as routing sees them for `prompt`; nodes that cannot serve it are left out."""
        now, index = self._clock(), self.index_of(prompt.revision)
        if index is None:
            return ReadyNodes({}, [])
        self._catch_up(self.nodes)
        holding_of = self.indexes.holdings(index.layout.fingerprint, prompt.hashes, prompt.transfer_tokens).get

        def seen(nodes: _Named) -> list[NodeView]:
            views = []
            for name, node in nodes:
                if now >= node.suspect_until and (not exclude or name not in exclude):
                    holding = holding_of(name, NOTHING)
                    promised = node.promised_tokens(prompt.hashes, holding, now) if node.underway.by_end else 0
                    landing = node.landing(prompt.hashes, holding, now) if node.arrivals else NO_LANDING
                    views.append(node.view(holding, self._decode_slots, now, promised, *landing))
            return views

        prefills, decodes = self._ready(prompt.revision)
        by_cluster = {cluster: views for cluster, nodes in prefills.items() if (views := seen(nodes))}
        return ReadyNodes(by_cluster, seen(decodes))

    def ready(self, role: Role, revision: str | None = None, model: str | None = None) -> list[ClusterNode]:
        """Nodes of that role, and of that revision or any of a model or of all, to which new work may be sent."""
        now = self._clock()
        found: list[ClusterNode] = []
        names = [name for name, served in self.revisions.items() if model is None or served.key == model]
        for name in names if revision is None else (revision,):
            prefills, decodes = self._ready(name)
            named = decodes if role is Role.DECODE else [each for nodes in prefills.values() for each in nodes]
            found += [node for _, node in named if now >= node.suspect_until]
        return found

    def _ready(self, revision: str) -> _Serving:
        if self._serving is None:
            self._serving = {name: ({}, []) for name in self.revisions}
            for node in self.nodes:
                if node.state != "ready" or node.revision not in self.revisions:
                    continue
                prefills, decodes = self._serving[node.revision]
                if node.role == Role.DECODE:
                    decodes.append((node.id, node))
                else:
                    prefills.setdefault(node.cluster, []).append((node.id, node))
        return self._serving.get(revision, ({}, []))

    async def has_died(self, node: ClusterNode, engine: tuple[str, int]) -> bool:
        """Whether the process that was the `engine` of `node` is gone; the news of it may take a moment."""

        def is_gone() -> bool:
            return node.state in ("down", "engine_down", "starting") or node.engine != engine

        return is_gone() or await self.wait_for(is_gone, self._times.death_news_s)

    def suspect(self, node_id: str) -> None:
        """Leaves a node alone for a moment after it failed a request."""
        if (node := self._by_id.get(node_id)) is not None:
            node.suspect_until = self._clock() + self._times.suspect_s

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

    # What events change

    async def _watch(self, node: ClusterNode) -> None:
        """Follows one node for ever: watch, and again after a pause that grows while nothing comes."""
        failures = 0
        while True:
            try:
                async with aclosing(node.agent.watch(LOAD_INTERVAL_S, SILENCE_S)) as events:
                    async for event in events:
                        self._apply(node, event)
                        failures = 0
            except (AgentCallFailed, CacheError, ValueError, KeyError) as error:
                if isinstance(error, AgentCallFailed) and error.reason == RENEWED:
                    continue
                if node.connected or not failures:
                    log.warning("node %s is down: %s", node.id, error)
                reason = error.reason if isinstance(error, AgentCallFailed) else "bad_event"
            except Exception as error:
                self._tasks.unforeseen("watch", error)
                reason = "unforeseen"
            self._on_lost(reason)
            self._lost(node)
            if reason == "silent":
                self._give_up(node, self._times.quiet_s)
            await self.tidy()
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    def _apply(self, node: ClusterNode, event: NodeEvent) -> None:
        match event:
            case NodeInfo():
                self._describe(node, event)
            case PinnedPrefix():
                node.contexts.heard(event, self._clock())
            case NodeLoad():
                node.reported(event, self._clock())
            case _ if node.info is not None and node not in self.retired:
                self.indexes.apply(node.info, event)
        if node.state == SILENT:
            self._give_up(node, STILL_S)

    def _give_up(self, node: ClusterNode, quiet_s: float) -> None:
        """Ends what waits for an engine that says nothing, if another node could do its work: it may come back."""
        if node.info is not None and self.ready(Role.DECODE, model=node.model or ""):
            self._on_silent(node.info.engine_url, quiet_s)

    def _describe(self, node: ClusterNode, info: NodeInfo) -> None:
        if node in self.retired:  # only what waits for it wants to know
            node.info, node.connected = info, True
            self._changed.set()
            return
        former = _predecessor(self._successors, node)
        _check(info, [other for other in self.nodes if other is not node and other is not former])
        self._take_over(node)
        before, known = node.state, node.info
        self._name(node, info.node_id)
        if known is not None and known.layout_fingerprint != info.layout_fingerprint:
            self.indexes.drop(info.node_id)
        is_same_process = known is not None and known.boot_id == info.boot_id
        node.contexts.described(info.contexts, self._clock(), is_same_process=is_same_process)
        node.info = info
        node.connected = True
        node.suspect_until = float("-inf")
        if info.layout_json:
            self.indexes.of(info)
        self._serve()
        is_awaited = self.all_served.catalog.awaits(info.model_id)  # its model may be there in a moment
        if info.layout_json and not is_awaited and (why := self.all_served.why_unused(info)):
            log.warning("node %s is not used: %s", info.node_id, why)
        if node.state != before:
            log.info("node %s (%s of %s) is %s", node.id, info.role, info.cluster, node.state)

    def _serve(self) -> None:
        """Takes what connected nodes have for the revisions of their models, and has decisions look again."""
        for node in self.nodes:
            node.model = self.all_served.of_node(node.info) if node.info is not None else node.model
        self._serving = None
        self._changed.set()
        lost = [node.info for node in self.nodes if node.info is not None and not node.connected]
        self.all_served = served = self.all_served.by(
            _connected(self.nodes), self.indexes.layouts(), self.secrets, lost
        )
        self.models, self.revisions = served.models, served.revisions
        self.served = served.models.get(served.catalog.default)

    def _lost(self, node: ClusterNode) -> None:
        if node.connected and node not in self.retired:
            self.indexes.drop(node.id)
        node.connected = False
        node.reported(NodeLoad())
        if (successor := self._successors.get(node)) is not None:
            self._take_over(successor)
        self._serve()

    def _name(self, node: ClusterNode, name: str) -> None:
        """`node` says that this is its name.

        If it had another one, another node answers at its address: what the one before had is gone with its name. Another node
        that bore this one, and is not there any more, is known by its address until it says who it is.
        """
        if node.info is not None and (before := node.info.node_id) != name:
            if self._by_id.get(before) is node:
                del self._by_id[before]
            self.indexes.drop(before)
            self._on_renamed(before)
        bearer = self._by_id.get(name)
        if bearer is not None and bearer is not node and bearer.info is not None:
            bearer.info = replace(bearer.info, node_id=bearer.agent.address)
        self._by_id[name] = node

    async def tidy(self) -> None:
        """Frees what was said of caches by nodes that are out. The layout served stays: its nodes may come back."""

        def used() -> set[str]:
            layouts = {info.layout_fingerprint for info in _connected(self.nodes)}
            return layouts | {served.layout.fingerprint for served in self.models.values()}

        await self.indexes.tidy(used)


def is_ready(clusters: Clusters, served: ServedModel) -> bool:
    """Whether a request could be served now by this revision."""
    name = served.revision
    return bool(clusters.ready(Role.DECODE, name) and (clusters.ready(Role.PREFILL, name) or not served.is_paired))


def unfit(nodes: Collection[ClusterNode], prompt: Prompt) -> set[str]:
    """Nodes whose engines do not serve the adapter of `prompt`, or take no media if it has some."""
    return {
        node.id
        for node in nodes
        if (info := node.info) is not None
        and ((prompt.adapter and prompt.adapter not in info.adapters) or (prompt.has_media and not info.takes_media))
    }


def _connected(nodes: Sequence[ClusterNode]) -> list[NodeInfo]:
    return [node.info for node in nodes if node.connected and node.info]


def _predecessor(successors: Mapping[ClusterNode, ClusterNode], node: ClusterNode) -> ClusterNode | None:
    return next((old for old, new in successors.items() if new is node), None)


def _check(info: NodeInfo, others: Collection[ClusterNode]) -> None:
    """Raises ValueError for a description that cannot be worked with; the node counts as down, and the log says why."""
    Role(info.role)
    ClusterKind(info.cluster_kind)
    if any(other.connected and other.info and other.info.node_id == info.node_id for other in others):
        raise ValueError(f"another node has the same node_id, {info.node_id!r}")
