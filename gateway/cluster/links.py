"""The links between clusters: what their senders report, what was promised to them, and whether they carry anything.

A transfer whose receiver could not be reached opens the breaker of its path and of all others over the same line; requests then
leave the link alone, until a probe (gateway.cluster.link_probes) has had an answer. Whose fault a failure was is asked before: a
receiver that is gone itself says nothing of the way to it. What follows of either is `planner.decisions.links.paths`'s to say.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.cluster.agent_values import LinkLoad, PrefillOutcome
from gateway.cluster.node import ClusterNode
from gateway.config.gateway import GatewayConfig
from membership.lines import Ends, Line, LineUse, by_ends, uses
from planner.decisions.estimates.coding import CodingEstimate
from planner.decisions.links.paths import PATH_FAILED, Paths
from planner.decisions.links.reports import carried_bytes_per_s
from planner.decisions.routing.lines import own_lines, seen_by_sender, shared_line
from planner.decisions.views import ClusterKind, LinkView, Role

log = logging.getLogger("prfaas.gateway.links")

PRFAAS: Final = ClusterKind.PRFAAS.value
FEW_SENDERS: Final = 8  # of a line: whatever one of them says counts at once
RENEWED_S: Final = 0.05  # what more of them report does after this; each does so every quarter of a second
UNHEARD: Final = "unheard"  # of a sender whose agent does not answer the gateway


# Of senders their names, what they report, were promised and may send.
_Sender = tuple[str, LinkLoad | None, int, float | None]
_SeenBySender = tuple[_Sender, LinkView | None]
# Who the senders are; what was promised to those that were promised anything; those that cannot send; pairs without a
# way; what coding makes of bytes. Last, whether it is drained.
_MadeOf = tuple[
    tuple[object, ...], tuple[tuple[str, int], ...], tuple[str, ...], tuple[tuple[str, str], ...], float, bool
]


class _Reported(NamedTuple):
    """Who the senders of a cluster are, what they have said last, for all its links, and which were promised anything."""

    infos: tuple[object, ...]
    loads: tuple[object, ...]
    promising: Sequence[ClusterNode]


class _ViewedLine(NamedTuple):
    """A view, what it was made of, and the link as each sender has it."""

    made_of: _MadeOf
    loads: tuple[object, ...]
    made_at: float
    seen: Mapping[str, _SeenBySender]
    view: LinkView


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A link as `GET /prfaas/links` shows it; `lost` are pairs without a way.

    `senders` are the states of their breakers by node, UNHEARD of one whose agent does not answer.
    """

    source: str
    destination: str
    up: bool
    drained: bool
    senders: dict[str, str]
    lost: tuple[tuple[str, str], ...]
    available_bytes_per_s: float | None
    budget_bytes_per_s: float | None
    utilisation: float
    queued_bytes: float
    promised_bytes: float
    rtt_s: float  # the longest that a sender measures now, whatever of it decisions take for a queue
    min_rtt_s: float
    congested: bool
    coded_ratio: float  # coded over plain bytes, while the link binds
    lines: tuple[LineUse, ...] = ()  # that are described, and what each carries of it


class ClusterLinks:
    """All links. `nodes` are all nodes there are, whatever their state; `expected` links there are before they are heard of."""

    def __init__(
        self,
        nodes: Sequence[ClusterNode],
        clock: Callable[[], float],
        unmeasured_bytes_per_s: float = 0.0,
        on_failed: Callable[[str, str], None] = lambda source, destination: None,
        expected: Sequence[tuple[str, str]] = (),
        is_budget_shared: bool = False,
        remembered: Mapping[str, str] = MappingProxyType({}),
        lines: Sequence[Line] = (),
    ) -> None:
        """A link with `lines` that is not measured yet has their bandwidth.

        With `is_budget_shared` what one sender of a line does not need of its budget is another's.

        `remembered` are nodes that have left, with their clusters: they may come back, so their breakers stay.
        """
        self._nodes = nodes
        self._clock = clock
        self._unmeasured_bytes_per_s = unmeasured_bytes_per_s
        self._on_failed = on_failed
        self._expected = expected
        self._lines = lines
        self._capacities, self._names = _capacities(lines), _names(lines)
        self._is_budget_shared = is_budget_shared
        self._remembered = remembered
        self._paths = Paths()
        self._drained: frozenset[tuple[str, str]] = frozenset()
        self._coding: dict[tuple[str, str], CodingEstimate] = {}  # by (source, destination)
        self._viewed: dict[tuple[str, str], _ViewedLine] = {}

    @property
    def num_failed(self) -> int:
        """Paths that failed and have not answered since."""
        return self._paths.num_failed

    # What decisions ask

    def views(self) -> list[LinkView]:
        """The egress from each PrfaaS cluster to each PD cluster, as all its senders together see it.

        A link that no node has measured yet is taken to be up, its bandwidth what the configuration says, or unknown. A
        link stays listed, and is down, while no agent of its senders answers.
        """
        senders: dict[str, list[ClusterNode]] = {}
        destinations: dict[str, None] = {}
        for node in self._nodes:
            info = node.info
            if info is None:
                continue
            if info.cluster_kind == PRFAAS:
                connected = senders.setdefault(info.cluster, [])
                if node.connected:
                    connected.append(node)
            else:
                destinations[info.cluster] = None
        ways = dict.fromkeys((source, to) for source in senders for to in destinations)
        ways |= dict.fromkeys((*self._expected, *sorted(self._drained)))
        reported = {source: _reported(nodes) for source, nodes in senders.items()}
        nothing = _reported(())
        self._viewed = {
            (source, to): self._view(source, to, senders.get(source, ()), reported.get(source, nothing))
            for source, to in ways
        }
        return [known.view for known in self._viewed.values()]

    def is_up(self, sender: ClusterNode, receiver: ClusterNode) -> bool:
        """Whether anything may be sent that way. Within a cluster there is no link that could fail."""
        if sender.cluster == receiver.cluster:
            return True
        way = (sender.cluster, receiver.cluster)
        is_drained = way in self._drained or way[::-1] in self._drained  # it is one line that is to be worked at
        return not is_drained and self._paths.is_up(sender.id, receiver.id, receiver.cluster)

    def cut_off_from(self, receiver: str) -> set[str]:
        """Senders that do not reach that node, although they reach others of its cluster."""
        return self._paths.cut_off_from(receiver)

    def _view(
        self, source: str, destination: str, senders: Sequence[ClusterNode], reported: "_Reported"
    ) -> "_ViewedLine":
        not_up = self._paths.not_up()
        cut_off = tuple(node.id for node in senders if (node.id, destination) in not_up) if not_up else ()
        made_of = (
            reported.infos,
            tuple([(node.id, sent) for node in reported.promising if (sent := node.promised_bytes.get(destination))]),
            cut_off,
            self._lost_pairs(source, destination),
            self._coded_ratio(source, destination),
            (source, destination) in self._drained,
        )
        known = self._viewed.get((source, destination))
        now = self._clock()
        # Nodes report now and then, decisions come in between. One report changes little of a line with many senders.
        is_recent = known is not None and len(senders) > FEW_SENDERS and now - known.made_at < RENEWED_S
        if known is not None and known.made_of == made_of and (is_recent or known.loads == reported.loads):
            return known
        before = known.seen if known is not None else {}
        able = [node for node in senders if node.id not in cut_off] if cut_off else senders
        seen: dict[str, _SeenBySender] = {}
        for node in able:
            sender = _sender(node, destination)
            of = before.get(sender[0])
            # Of the senders of a large cluster, a few have reported since the decision before.
            is_same = of is not None and of[0] == sender
            seen[sender[0]] = (
                of if of is not None and is_same else (sender, seen_by_sender(source, destination, *sender[1:]))
            )
        return _ViewedLine(made_of, reported.loads, now, seen, self._line(source, destination, made_of, seen))

    def _line(self, source: str, destination: str, made_of: "_MadeOf", seen: Mapping[str, "_SeenBySender"]) -> LinkView:
        _, _, cut_off, lost, coded_ratio, drained = made_of
        senders = [sender for sender, _ in seen.values()]
        own = {name: view for name, (_, view) in seen.items() if view is not None}
        # Promised by nodes that have not sent there yet, and say nothing of their budget.
        unseen_bytes = sum(promised for name, _, promised, _ in senders if name not in own)
        line = shared_line([*own.values()]) if own else LinkView(source=source, destination=destination)
        return replace(
            line,
            up=bool(senders) and not drained,
            drained=drained,
            cut_off=cut_off,
            lost=lost,
            available_bytes_per_s=line.available_bytes_per_s
            or self._capacities.get((source, destination), self._unmeasured_bytes_per_s)
            or None,
            promised_bytes=line.promised_bytes + unseen_bytes,
            coded_ratio=coded_ratio,
            lines=self._names.get((source, destination), ()),
            # With shared budgets, what one sender leaves of the line is for the others.
            senders=() if self._is_budget_shared else own_lines(line, own, len(senders), coded_ratio),
        )

    def _coded_ratio(self, source: str, destination: str) -> float:
        known = self._coding.get((source, destination))
        return 1.0 if known is None else round(known.ratio(self._clock()), 2)

    def learn_coding(self, sender: ClusterNode, receiver: ClusterNode, outcome: PrefillOutcome) -> None:
        """What a transfer over a link was made of: what the next one will be, once the link binds."""
        if sender.cluster == receiver.cluster or not outcome.delivered:
            return
        path, waited_s = (sender.cluster, receiver.cluster), outcome.delivered_s - outcome.prefill_end_s
        known = self._coding.setdefault(path, CodingEstimate())
        known.observe(outcome.bytes_total, outcome.bytes_saved, waited_s, self._clock())

    def _lost_pairs(self, source: str, destination: str) -> tuple[tuple[str, str], ...]:
        if not (pairs := self._paths.lost_pairs()):
            return ()
        clusters = {node.id: node.cluster for node in self._nodes}
        wanted = (source, destination)
        return tuple(pair for pair in pairs if (clusters.get(pair[0]), clusters.get(pair[1])) == wanted)

    def configure(self, config: GatewayConfig) -> None:
        """Other links are expected, and other lines described, from now on."""
        self._expected, self._lines = config.ways, config.lines
        self._capacities, self._names = _capacities(config.lines), _names(config.lines)
        self._viewed = {}

    def status(self) -> list["LinkStatus"]:
        """Every link, and the state of each of its senders, for operators."""
        views, of_cluster = self.views(), defaultdict[str, list[ClusterNode]](list)
        for node in self._nodes:  # once, not for every link
            of_cluster[node.cluster].append(node)
        loads = {(view.source, view.destination): _loads(of_cluster[view.source], view) for view in views}
        lines = uses(self._lines, {ends: sum(map(carried_bytes_per_s, of_it)) for ends, of_it in loads.items()})
        return [
            LinkStatus(
                source=view.source,
                destination=view.destination,
                up=view.up,
                drained=view.drained,
                senders={
                    node.id: str(self._paths.state(node.id, view.destination)) if node.connected else UNHEARD
                    for node in of_cluster[view.source]
                    if node.info is not None
                },
                lost=view.lost,
                available_bytes_per_s=view.available_bytes_per_s,
                budget_bytes_per_s=view.budget_bytes_per_s,
                utilisation=view.utilisation,
                queued_bytes=view.queued_bytes,
                promised_bytes=view.promised_bytes,
                rtt_s=max([load.rtt_s for load in loads[view.source, view.destination]], default=0.0),
                min_rtt_s=view.min_rtt_s,
                congested=view.congested,
                coded_ratio=view.coded_ratio,
                lines=lines.get((view.source, view.destination), ()),
            )
            for view in views
        ]

    # What operators want

    def drain(self, links: frozenset[tuple[str, str]]) -> None:
        """Nothing new goes over these links, by (source, destination); over all others what may. What is under way goes on."""
        for source, destination in sorted(links ^ self._drained):
            what = "drained" if (source, destination) in links else "used again"
            log.warning("link from=%s to=%s is %s, as operators want it", source, destination, what)
        self._drained = links

    # What transfers and probes have seen

    def failed(self, sender: ClusterNode, receiver: ClusterNode) -> None:
        """`sender` had no connection to `receiver`, which is well itself."""
        siblings = [node.id for node in self._nodes if node is not sender and node.cluster == sender.cluster]
        if self._paths.failed(sender.id, siblings, receiver.id, receiver.cluster, self._clock()):
            self._on_failed(sender.cluster, receiver.cluster)
            log.warning(
                "link from=%s to=%s is down: node %s cannot reach %s; long prompts stay at home",
                sender.cluster, receiver.cluster, sender.id, receiver.id,
            )  # fmt: skip

    def still_down(self, sender: ClusterNode, receiver: ClusterNode) -> None:
        """A probe of the way to `receiver` had no answer; of the sender's siblings' it says nothing."""
        self._paths.still_down(sender.id, receiver.id, receiver.cluster, self._clock())

    def arrived(self, sender: ClusterNode, receiver: ClusterNode) -> None:
        """Something got through: the line is well, and receivers of it that were not reached have no such excuse any more."""
        found = self._paths.arrived(sender.id, receiver.id, receiver.cluster, self._clock())
        for lost in found.left_out:
            log.warning("node %s reaches %s but not %s, to which it sends nothing", sender.id, receiver.id, lost)
        if found.is_back:
            log.info("link from=%s to=%s is up again for node %s", sender.cluster, receiver.cluster, sender.id)

    def unasked(self, sender: ClusterNode, receiver: ClusterNode) -> None:
        """`sender` knows no probes, being of an earlier version: a request may try the way."""
        self._paths.unasked(sender.id, receiver.id, receiver.cluster)

    # What is to be probed

    def probes(self) -> list[tuple[ClusterNode, list[ClusterNode]]]:
        """Senders with a way to be probed now, and the receivers to try, one after the other."""
        now = self._clock()
        self._forget({node.id for node in self._nodes})
        # One that has not been heard may be listed by the name of another.
        by_id = {node.id: node for node in self._nodes if node.info is not None}
        lines = [
            (by_id[sender], self._candidates(sender, destination, now, by_id))
            for sender, destination in self._paths.lines_to_probe(now)
            if sender in by_id
        ]
        pairs = [
            (by_id[sender], [by_id[receiver]] if by_id[receiver].is_ready(now) else [])
            for sender, receiver in self._paths.pairs_to_probe(now)
            if sender in by_id and receiver in by_id
        ]
        return lines + pairs

    def _candidates(
        self, sender: str, destination: str, now: float, by_id: Mapping[str, ClusterNode]
    ) -> list[ClusterNode]:
        """Decode nodes, for it is them that requests send to, in the order in which to try them."""
        ready = [
            node.id
            for node in self._nodes
            if node.cluster == destination and node.role == Role.DECODE and node.is_ready(now)
        ]
        return [by_id[each] for each in self._paths.in_order(sender, destination, ready)]

    def _forget(self, names: Collection[str]) -> None:
        """Nodes without one of these names that are not remembered either are gone for good."""
        clusters = {*(node.cluster for node in self._nodes), *self._remembered.values()}
        self._paths.forget({*names, *self._remembered}, clusters)
        self._coding = {path: known for path, known in self._coding.items() if clusters.issuperset(path)}


def is_path_failure(reason: str, sender: ClusterNode, receiver: ClusterNode, engine: tuple[str, int]) -> bool:
    """Whether a transfer that ended for `reason` tells of the way: its receiver is there, and its `engine` what it was."""
    return (
        reason == PATH_FAILED
        and sender.cluster != receiver.cluster
        and receiver.state == "ready"
        and receiver.engine == engine
    )


def _reported(nodes: Sequence[ClusterNode]) -> _Reported:
    infos, loads = tuple([node.info for node in nodes]), tuple([node.load for node in nodes])
    return _Reported(infos, loads, [node for node in nodes if node.promised_bytes])


def _capacities(lines: Sequence[Line]) -> dict[Ends, float]:
    """What may go between two clusters, in bytes a second, over all lines there are."""
    return {ends: line.bytes_per_s for ends, line in by_ends(lines).items()}


def _names(lines: Sequence[Line]) -> dict[Ends, tuple[str, ...]]:
    found: dict[Ends, tuple[str, ...]] = {}
    for line in lines:
        found[line.ends] = (*found.get(line.ends, ()), line.label)
    return found


def _sender(node: ClusterNode, destination: str) -> _Sender:
    promised_bytes = node.promised_bytes.get(destination, 0)
    return node.id, node.link_to(destination), promised_bytes, node.own_budget_to(destination)


def _loads(senders: Sequence[ClusterNode], view: LinkView) -> list[LinkLoad]:
    return [load for node in senders if node.connected and (load := node.link_to(view.destination)) is not None]
