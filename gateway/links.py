"""The links between clusters: what their senders report, what was promised to them, and whether they carry anything.

A transfer whose receiver could not be reached opens the breaker of its path and of all others over the same line; requests then
leave the link alone, until a probe (gateway.probes) has had an answer. Whose fault a failure was is asked before: a receiver
that is gone itself says nothing of the way to it.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.agent import LinkLoad
from gateway.node import Node
from planner.decisions.breaker import Breakers, State
from planner.decisions.lines import shared_line
from planner.decisions.views import ClusterKind, LinkView

log = logging.getLogger("prfaas.gateway.links")

PATH_FAILED: Final = "peer_lost"  # what a sender says of a receiver that it had no connection to for its peer timeout


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A link as `GET /prfaas/links` shows it; `senders` are the states of their breakers by node."""

    source: str
    destination: str
    up: bool
    senders: dict[str, str]
    available_bytes_per_s: float | None
    budget_bytes_per_s: float | None
    utilisation: float
    queued_bytes: float
    promised_bytes: float
    rtt_s: float
    congested: bool


class Links:
    """All links. `nodes` are all nodes there are, whatever their state."""

    def __init__(
        self,
        nodes: Sequence[Node],
        clock: Callable[[], float],
        unmeasured_bytes_per_s: float = 0.0,
        on_failed: Callable[[str, str], None] = lambda source, destination: None,
    ) -> None:
        self._nodes = nodes
        self._clock = clock
        self._unmeasured_bytes_per_s = unmeasured_bytes_per_s
        self._on_failed = on_failed
        self._breakers = Breakers()
        self._receivers: dict[tuple[str, str], str] = {}  # by path that failed: who could not be reached

    @property
    def num_failed(self) -> int:
        """Paths that failed and of which nobody has heard since."""
        return len(self._receivers)

    # What decisions ask

    def views(self) -> list[LinkView]:
        """The egress from each PrfaaS cluster to each PD cluster, as all its senders together see it.

        A link that no node has measured yet is taken to be up, its bandwidth what the configuration says, or unknown.
        """
        senders: dict[str, list[Node]] = defaultdict(list)
        destinations: dict[str, None] = {}
        for node in self._nodes:
            if not node.connected or node.info is None:
                continue
            if node.info.cluster_kind == ClusterKind.PRFAAS:
                senders[node.info.cluster].append(node)
            else:
                destinations[node.info.cluster] = None
        return [self._view(source, to, sending) for source, sending in senders.items() for to in destinations]

    def is_up(self, sender: Node, receiver: Node) -> bool:
        """Whether anything may be sent that way. Within a cluster there is no link that could fail."""
        return sender.cluster == receiver.cluster or self._breakers.up(sender.id, receiver.cluster)

    def _view(self, source: str, destination: str, senders: Sequence[Node]) -> LinkView:
        cut_off = [node.id for node in senders if not self._breakers.up(node.id, destination)]
        able = [node for node in senders if node.id not in cut_off] if cut_off else senders
        seen: list[LinkView] = []
        unseen_bytes = 0  # promised by nodes that have not sent there yet: of the line they can say nothing
        for node in able:
            promised_bytes = node.promised_bytes[destination]
            if (load := node.link_to(destination)) is None:
                unseen_bytes += promised_bytes
            else:
                seen.append(_seen_by_sender(source, load, promised_bytes))
        line = shared_line(seen) if seen else LinkView(source=source, destination=destination)
        return replace(
            line,
            up=bool(able),
            cut_off=tuple(cut_off),
            available_bytes_per_s=line.available_bytes_per_s or self._unmeasured_bytes_per_s or None,
            promised_bytes=line.promised_bytes + unseen_bytes,
        )

    def status(self) -> list["LinkStatus"]:
        """Every link, and the state of each of its senders, for operators."""
        return [
            LinkStatus(
                source=view.source,
                destination=view.destination,
                up=view.up,
                senders={
                    node.id: str(self._breakers.state(node.id, view.destination))
                    for node in self._nodes
                    if node.connected and node.cluster == view.source
                },
                available_bytes_per_s=view.available_bytes_per_s,
                budget_bytes_per_s=view.budget_bytes_per_s,
                utilisation=view.utilisation,
                queued_bytes=view.queued_bytes,
                promised_bytes=view.promised_bytes,
                rtt_s=view.rtt_s,
                congested=view.congested,
            )
            for view in self.views()
        ]

    # What transfers and probes have seen

    def failed(self, sender: Node, receiver: Node) -> None:
        """`sender` had no connection to `receiver`, which is well itself."""
        destination = receiver.cluster
        siblings = [node.id for node in self._nodes if node is not sender and node.cluster == sender.cluster]
        before = self._breakers.state(sender.id, destination)
        self._breakers.on_failed(sender.id, siblings, destination, self._clock())
        for each in (sender.id, *siblings):
            self._receivers[each, destination] = receiver.id
        if before is State.CLOSED:
            self._on_failed(sender.cluster, destination)
            log.warning(
                "link from=%s to=%s is down: node %s cannot reach %s; long prompts stay at home",
                sender.cluster, destination, sender.id, receiver.id,
            )  # fmt: skip

    def still_down(self, sender: Node, destination: str) -> None:
        """A probe of `sender`'s path had no answer; of its siblings' it says nothing."""
        self._breakers.on_failed(sender.id, (), destination, self._clock())

    def arrived(self, sender: Node, destination: str) -> None:
        """Something got through."""
        if self._breakers.up(sender.id, destination):
            return
        self._breakers.on_arrived(sender.id, destination, self._clock())
        self._receivers.pop((sender.id, destination), None)
        log.info("link from=%s to=%s is up again for node %s", sender.cluster, destination, sender.id)

    # What is to be probed

    def probes(self) -> list[tuple[Node, list[Node]]]:
        """Senders whose path is to be probed now, and the receivers to try: the one that could not be reached before others."""
        now = self._clock()
        by_id = {node.id: node for node in self._nodes}
        self._breakers.forget(by_id)
        self._receivers = {path: receiver for path, receiver in self._receivers.items() if path[0] in by_id}
        return [
            (by_id[sender], self._candidates(sender, destination, now))
            for sender, destination in self._breakers.probes(now)
        ]

    def _candidates(self, sender: str, destination: str, now: float) -> list[Node]:
        failed = self._receivers.get((sender, destination))
        ready = [node for node in self._nodes if node.cluster == destination and node.is_ready(now)]
        return sorted(ready, key=lambda node: node.id != failed)


def is_path_failure(reason: str, sender: Node, receiver: Node, engine: tuple[str, int]) -> bool:
    """Whether a transfer that ended for `reason` tells of the way: its receiver is there, and its `engine` what it was."""
    return (
        reason == PATH_FAILED
        and sender.cluster != receiver.cluster
        and receiver.state == "ready"
        and receiver.engine == engine
    )


def _seen_by_sender(source: str, load: LinkLoad, promised_bytes: int) -> LinkView:
    return LinkView(
        source=source,
        destination=load.peer,
        available_bytes_per_s=load.available_bytes_per_s or None,
        budget_bytes_per_s=load.budget_bytes_per_s or None,
        utilisation=load.utilisation,
        retransmit_ratio=load.retransmit_ratio,
        queued_bytes=load.queued_bytes,
        # What is queued already was promised before.
        promised_bytes=max(0, promised_bytes - load.queued_bytes),
        congested=load.congested,
        # Longer round trips are a queue only where the sender says so; else they say nothing.
        rtt_s=load.rtt_s if load.inflated or not load.min_rtt_s else min(load.rtt_s, load.min_rtt_s),
        min_rtt_s=load.min_rtt_s,
        estimate_error=load.estimate_error,
    )
