"""Several senders on one line: what they report of it becomes one link, and its bandwidth is counted once."""

from collections.abc import Sequence

from planner.decisions.views import LinkView


def shared_line(seen: Sequence[LinkView]) -> LinkView:
    """The link as all its senders together see it; `seen` is one view per sender, of the same two clusters, and not empty.

    Senders that are idle each see the whole line, senders that send each their part of it. So the line has at least what any
    of them sees, and at least what all of them carry now; their sum would count an idle line once per sender. What waits at
    each of them is its own, and does add up. Signals of congestion are those of the sender with the longest queue.
    """
    worst = seen[0]
    worst_s = worst.rtt_s - worst.min_rtt_s
    available = carried = budget = queued = promised = utilisation = retransmits = error = 0.0
    up, is_budgeted = False, True
    for link in seen:
        rate, delay_s = link.available_bytes_per_s or 0.0, link.rtt_s - link.min_rtt_s
        if (link.congested, delay_s) > (worst.congested, worst_s):
            worst, worst_s = link, delay_s
        available = max(available, rate)
        carried += rate * link.utilisation
        # A budget is each sender's own: together they may send all of them, as far as every sender has one.
        is_budgeted = is_budgeted and bool(link.budget_bytes_per_s)
        budget += link.budget_bytes_per_s or 0.0
        queued += link.queued_bytes
        promised += link.promised_bytes
        utilisation = max(utilisation, link.utilisation)
        retransmits = max(retransmits, link.retransmit_ratio)
        error = max(error, link.estimate_error)
        up = up or link.up
    return LinkView(
        source=worst.source,
        destination=worst.destination,
        up=up,
        cut_off=tuple(sender for link in seen if link.cut_off for sender in link.cut_off),
        lost=tuple(pair for link in seen if link.lost for pair in link.lost),
        available_bytes_per_s=max(available, carried) or None,
        budget_bytes_per_s=budget if is_budgeted else None,
        utilisation=utilisation,
        retransmit_ratio=retransmits,
        queued_bytes=queued,
        promised_bytes=promised,
        congested=worst.congested,
        rtt_s=worst.rtt_s,
        min_rtt_s=worst.min_rtt_s,
        estimate_error=error,
    )
