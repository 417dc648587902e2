"""The links between clusters as decisions see them: what their senders report, and what was promised to them."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from gateway.agent import LinkLoad
from gateway.node import Node
from planner.decisions.lines import shared_line
from planner.decisions.views import ClusterKind, LinkView


def link_views(nodes: Collection[Node], unmeasured_bytes_per_s: float) -> list[LinkView]:
    """The egress from each PrfaaS cluster to each PD cluster, as its senders among `nodes` together see it.

    A link that no node has measured yet is taken to be up, its bandwidth what the configuration says, or unknown.
    """
    destinations = sorted({node.cluster for node in nodes if node.info and node.info.cluster_kind == ClusterKind.PD})
    senders: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.info and node.info.cluster_kind == ClusterKind.PRFAAS:
            senders[node.info.cluster].append(node)
    return [
        _link(source, to, sending, unmeasured_bytes_per_s) for source, sending in senders.items() for to in destinations
    ]


def _link(source: str, destination: str, senders: Sequence[Node], unmeasured_bytes_per_s: float) -> LinkView:
    seen: list[LinkView] = []
    unseen_bytes = 0  # promised by nodes that have not sent there yet: of the line they can say nothing
    for node in senders:
        promised_bytes = node.promised_bytes[destination]
        if (load := node.link_to(destination)) is None:
            unseen_bytes += promised_bytes
        else:
            seen.append(_seen_by_sender(source, load, promised_bytes))
    if not seen:
        return LinkView(
            source=source,
            destination=destination,
            available_bytes_per_s=unmeasured_bytes_per_s or None,
            promised_bytes=unseen_bytes,
        )
    line = shared_line(seen)
    return replace(
        line,
        available_bytes_per_s=line.available_bytes_per_s or unmeasured_bytes_per_s or None,
        promised_bytes=line.promised_bytes + unseen_bytes,
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
        rtt_s=load.rtt_s,
        min_rtt_s=load.min_rtt_s,
        estimate_error=load.estimate_error,
    )
