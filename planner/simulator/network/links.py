"""Links as simulated deciders know them: what monitors tell, breakers, and probes, by the code and in the times of gateways.

    a path fails ──► breakers open ──► every PROBE_TICK_S: what is due is probed ──► an answer, or the peer timeout

Whether a link carries anything is the egress' to know; a decider learns it from what fails and what arrives.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from msgspec import structs

from planner.decisions.links.paths import MAX_LOST, PROBE_TICK_S, Paths
from planner.decisions.views import LinkView
from planner.simulator.loop import Loop
from planner.simulator.network.divided import DividedEgress
from planner.simulator.network.egress import SimulatedEgress
from planner.simulator.nodes.node import DecodeNode, PrefillNode, SimulatedRequest
from planner.simulator.scenario import Scenario, Wire


class SimulatedLinks:
    """All links of a scenario. `senders` are the prefill nodes by name, `decodes` the decode nodes there are now."""

    def __init__(
        self,
        scenario: Scenario,
        senders: Mapping[str, PrefillNode],
        decodes: Mapping[str, DecodeNode],
        loop: Loop,
        *,
        on_delivered: Callable[[float, Any], None],
        on_lost: Callable[[float, list[Any]], None],
        is_over: Callable[[], bool],
    ) -> None:
        """`is_over` says that there is nothing more to send, and so to probe for."""
        by_cluster = groupby(senders.values(), lambda node: node.pool.name)
        self._senders = {name: tuple(node.node_id for node in nodes) for name, nodes in by_cluster}

        def egress(wire: Wire) -> SimulatedEgress:
            names = self._senders.get(wire.source, ())
            if wire.senders == 1 or not names:
                return SimulatedEgress(wire, loop, on_delivered, on_lost, scenario.peer_timeout_s)
            return DividedEgress(wire, loop, on_delivered, on_lost, scenario.peer_timeout_s, names, is_over)

        self.all = [egress(wire) for wire in scenario.wires]
        self._by_ends = {(link.wire.source, link.wire.destination): link for link in self.all}
        # The other direction of the same lines: only prefixes go there.
        for wire in scenario.wires if scenario.routing.cross_cluster_cache else ():
            back = replace(wire, source=wire.destination, destination=wire.source, senders=1, shares_egress=False)
            self._by_ends[back.source, back.destination] = SimulatedEgress(
                back, loop, on_delivered, on_lost, scenario.peer_timeout_s
            )
        self._cluster_of = {name: cluster for cluster, names in self._senders.items() for name in names}
        self._decodes = decodes
        self._loop = loop
        self._patience_s = scenario.peer_timeout_s
        self._is_over = is_over
        self._paths = Paths()
        self._troubled = False  # some path is not used, or has failed and not been heard of since
        self.failures: dict[
            tuple[str, str], int
        ] = {}  # by (source, destination): how often a link went down for deciders

    def between(self, source: str, destination: str) -> SimulatedEgress:
        return self._by_ends[source, destination]

    def views(self, now: float) -> list[LinkView]:
        """Every link, as its senders and its breakers tell of it."""
        if not self._troubled:
            return [link.view(now) for link in self.all]
        not_up, pairs = self._paths.not_up(), self._paths.lost_pairs()
        return [self._view(link, now, not_up, pairs) for link in self.all]

    def _view(
        self, link: SimulatedEgress, now: float, not_up: Collection[tuple[str, str]], pairs: Sequence[tuple[str, str]]
    ) -> LinkView:
        source, destination = link.wire.source, link.wire.destination
        senders = self._senders.get(source, ())
        cut_off = tuple(sender for sender in senders if (sender, destination) in not_up)
        lost = tuple(
            (sender, receiver) for sender, receiver in pairs
            if self._cluster_of.get(sender) == source and self._cluster_of_decode(receiver) == destination
        )  # fmt: skip
        return structs.replace(link.view(now), up=len(cut_off) < len(senders), cut_off=cut_off, lost=lost)

    def _cluster_of_decode(self, node_id: str) -> str:
        node = self._decodes.get(node_id)
        return node.pool.name if node is not None else ""

    def cut_off_from(self, decode_node: str) -> set[str]:
        """Senders that do not reach that node, although they reach others of its cluster."""
        return self._paths.cut_off_from(decode_node)

    # What transfers have seen

    def arrived(self, now: float, job: SimulatedRequest) -> None:
        """A job's KVCache is with its decode node."""
        if self._troubled:
            assert job.route.prefill_node is not None
            self._paths.arrived(job.route.prefill_node, job.decode_node.node_id, job.decode_node.pool.name, now)

    def failed(self, now: float, job: SimulatedRequest) -> None:
        """A job's KVCache could not be sent."""
        sender, receiver = job.route.prefill_node, job.decode_node
        assert sender is not None
        source, destination = self._cluster_of[sender], receiver.pool.name
        siblings = [each for each in self._senders[source] if each != sender]
        if self._paths.failed(sender, siblings, receiver.node_id, destination, now):
            self.failures[source, destination] = self.failures.get((source, destination), 0) + 1
        if not self._troubled:
            self._troubled = True
            self._loop.at(now + PROBE_TICK_S, self._on_tick)

    # Probes

    def _on_tick(self, now: float, _: Any) -> None:
        if self._is_over():
            return
        self._troubled = bool(self._paths.num_failed or self._paths.not_up() or self._paths.lost_pairs())
        if not self._troubled:
            return
        for sender, cluster in self._paths.lines_to_probe(now):
            ready = [node.node_id for node in self._decodes.values() if node.pool.name == cluster and node.ready]
            self._probe(now, (sender, cluster, self._paths.in_order(sender, cluster, ready)[:MAX_LOST]))
        for sender, receiver in self._paths.pairs_to_probe(now):
            node = self._decodes.get(receiver)
            if node is not None and node.ready:
                self._probe(now, (sender, node.pool.name, [receiver]))
        self._loop.at(now + PROBE_TICK_S, self._on_tick)

    def _probe(self, now: float, asked: tuple[str, str, list[str]]) -> None:
        """Asks the first of some receivers, and the next one if there is no answer."""
        sender, cluster, receivers = asked
        if not receivers:
            return
        link = self._by_ends[self._cluster_of[sender], cluster]
        answer_at = link.up_again_at(now) + link.wire.rtt_s
        if answer_at <= now + self._patience_s:
            self._loop.at(answer_at, self._on_answer, asked)
        else:
            self._loop.at(now + self._patience_s, self._on_no_answer, asked)

    def _on_answer(self, now: float, asked: tuple[str, str, list[str]]) -> None:
        sender, cluster, receivers = asked
        self._paths.arrived(sender, receivers[0], cluster, now)

    def _on_no_answer(self, now: float, asked: tuple[str, str, list[str]]) -> None:
        sender, cluster, receivers = asked
        self._paths.still_down(sender, receivers[0], cluster, now)
        if not self._is_over():
            self._probe(now, (sender, cluster, receivers[1:]))
