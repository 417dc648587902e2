"""Several senders on one line: what they report of it becomes one link, and its bandwidth is counted once.

Where each has a budget of its own they are lines of their own beside that: a prompt leaves by one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from planner.decisions.links.reports import SenderReport, carried_bytes_per_s
from planner.decisions.routing.arrivals import bytes_to_send
from planner.decisions.routing.placement import soonest_s
from planner.decisions.views import LinkView, NodeView, PrefillCost, RouteRequest

BOUND: Final = 0.98  # of its budget: a sender that measures as much is held by it, and not by the line


def seen_by_sender(
    source: str,
    destination: str,
    report: SenderReport | None,
    promised_bytes: float,
    budget_bytes_per_s: float | None,
) -> LinkView | None:
    """The link as one sender has it; None where it has not sent there yet, and does not say what it may.

    `promised_bytes` are those of all requests that were sent to it and have not been delivered.
    """
    budget = budget_bytes_per_s or None
    if report is None:
        if budget_bytes_per_s is None:
            return None
        return LinkView(
            source=source, destination=destination, budget_bytes_per_s=budget, promised_bytes=promised_bytes
        )
    available, carried = report.available_bytes_per_s, carried_bytes_per_s(report)
    if budget not in (None, report.budget_bytes_per_s) and 0 < BOUND * report.budget_bytes_per_s <= available:
        available = budget_bytes_per_s or 0.0  # held by its share of a moment, not by the line
    may = available or budget or 0.0
    return LinkView(
        source=source,
        destination=destination,
        available_bytes_per_s=available or None,
        budget_bytes_per_s=budget,
        utilisation=carried / may if may else 0.0,  # above 1 of its own budget, while others lend it theirs
        retransmit_ratio=report.retransmit_ratio,
        queued_bytes=report.queued_bytes,
        # What is queued already was promised before.
        promised_bytes=max(0, promised_bytes - report.queued_bytes),
        congested=report.congested,
        # Longer round trips are a queue only where the sender says so; else they say nothing.
        rtt_s=report.rtt_s if report.inflated or not report.min_rtt_s else min(report.rtt_s, report.min_rtt_s),
        min_rtt_s=report.min_rtt_s,
        estimate_error=report.estimate_error,
    )


def own_lines(
    line: LinkView, seen: Mapping[str, LinkView], num_senders: int, coded_ratio: float = 1.0
) -> tuple[tuple[str, LinkView], ...]:
    """`LinkView.senders` of `line`, where all its senders are `seen` and each has a budget of its own; else nothing."""
    if line.budget_bytes_per_s is None or not len(seen) == num_senders > 1:
        return ()
    return tuple(
        (
            name,
            replace(
                view,
                coded_ratio=coded_ratio,
                rtt_s=view.rtt_s or line.min_rtt_s,
                utilisation=min(1.0, view.utilisation),
            ),
        )
        for name, view in seen.items()
    )


def shared_line(seen: Sequence[LinkView]) -> LinkView:
    """The link as all its senders together see it; `seen` is one view per sender, of the same two clusters, and not empty.

    Senders that are idle each see the whole line, senders that send each their part of it. So the line has at least what any
    of them sees, and at least what all of them carry now; their sum would count an idle line once per sender. Where budgets
    bind, the line has room for all of them. What waits at each sender is its own, and does add up. The utilisation is what
    all carry, of what they may. Signals of congestion are those of the sender with the longest queue.
    """
    worst = seen[0]
    worst_s = worst.rtt_s - worst.min_rtt_s  # of its round trips, which say nothing where they are 0
    available = carried = bound = budget = queued = promised = retransmits = error = 0.0
    up, is_budgeted = False, True
    for link in seen:
        rate, delay_s = link.available_bytes_per_s or 0.0, link.rtt_s - link.min_rtt_s
        if (link.congested, delay_s, link.rtt_s) > (worst.congested, worst_s, worst.rtt_s):
            worst, worst_s = link, delay_s
        available = max(available, rate)
        carried += (rate or link.budget_bytes_per_s or 0.0) * link.utilisation
        # A budget is each sender's own: together they may send all of them, as far as every sender has one.
        is_budgeted = is_budgeted and bool(link.budget_bytes_per_s)
        budget += link.budget_bytes_per_s or 0.0
        if link.budget_bytes_per_s and (not rate or rate >= BOUND * link.budget_bytes_per_s):
            bound += link.budget_bytes_per_s
        queued += link.queued_bytes
        promised += link.promised_bytes
        retransmits = max(retransmits, link.retransmit_ratio)
        error = max(error, link.estimate_error)
        up = up or link.up
    if available:
        available = max(available, carried, bound)
    may = min(available or budget, budget) if is_budgeted else available
    return LinkView(
        source=worst.source,
        destination=worst.destination,
        up=up,
        cut_off=tuple(sender for link in seen if link.cut_off for sender in link.cut_off),
        lost=tuple(pair for link in seen if link.lost for pair in link.lost),
        available_bytes_per_s=available or None,
        budget_bytes_per_s=budget if is_budgeted else None,
        utilisation=min(1.0, carried / may) if may else 0.0,
        retransmit_ratio=retransmits,
        queued_bytes=queued,
        promised_bytes=promised,
        congested=worst.congested,
        rtt_s=worst.rtt_s,
        min_rtt_s=worst.min_rtt_s,
        estimate_error=error,
    )


def soonest_senders(
    link: LinkView, nodes: list[NodeView], request: RouteRequest, decode: NodeView, cost: PrefillCost
) -> tuple[list[NodeView], LinkView]:
    """Of `nodes`, all senders of `link`, those whose own lines do not delay it, and the link as the soonest of them has it.

    A prompt is there when it is computed and has left, whichever takes longer. All whose lines are done by when the best of
    them is may compute it: which one does is for placement to say.
    """
    num_bytes = bytes_to_send(request, decode)
    arrives_s = [link.of(node.node_id).arrives_s(num_bytes) for node in nodes]
    if max(arrives_s) == min(arrives_s):
        return nodes, link.of(nodes[0].node_id)
    there_s = [max(soonest_s(request, [node], cost), line_s) for node, line_s in zip(nodes, arrives_s, strict=True)]
    limit_s = min(there_s)
    able = [node for node, line_s in zip(nodes, arrives_s, strict=True) if line_s <= limit_s]
    return able, link.of(nodes[there_s.index(limit_s)].node_id)
