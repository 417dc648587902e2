"""Several senders on one line: what they report of it becomes one link, and its bandwidth is counted once."""

from collections.abc import Sequence

from planner.decisions.views import LinkView


def shared_line(seen: Sequence[LinkView]) -> LinkView:
    """The link as all its senders together see it; `seen` is one view per sender, of the same two clusters, and not empty.

    Senders that are idle each see the whole line, senders that send each their part of it. So the line has at least what any
    of them sees, and at least what all of them carry now; their sum would count an idle line once per sender. What waits at
    each of them is its own, and does add up. Signals of congestion are those of the sender with the longest queue.
    """
    worst = max(seen, key=lambda link: (link.congested, link.rtt_s - link.min_rtt_s))
    rates = [link.available_bytes_per_s or 0.0 for link in seen]
    carried = sum(rate * link.utilisation for rate, link in zip(rates, seen, strict=True))
    available = max(*rates, carried)
    budgets = [link.budget_bytes_per_s for link in seen if link.budget_bytes_per_s]
    return LinkView(
        source=worst.source,
        destination=worst.destination,
        up=any(link.up for link in seen),
        cut_off=tuple(sender for link in seen for sender in link.cut_off),
        lost=tuple(pair for link in seen for pair in link.lost),
        available_bytes_per_s=available or None,
        # A budget is each sender's own: together they may send all of them, as far as every sender has one.
        budget_bytes_per_s=sum(budgets) if len(budgets) == len(seen) else None,
        utilisation=max(link.utilisation for link in seen),
        retransmit_ratio=max(link.retransmit_ratio for link in seen),
        queued_bytes=sum(link.queued_bytes for link in seen),
        promised_bytes=sum(link.promised_bytes for link in seen),
        congested=worst.congested,
        rtt_s=worst.rtt_s,
        min_rtt_s=worst.min_rtt_s,
        estimate_error=max(link.estimate_error for link in seen),
    )
