"""One line of several senders, as it is seen here."""

from dataclasses import replace

from gateway.agent import LinkLoad, NodeLoad
from gateway.links import link_views
from gateway.node import Node, Work
from planner.decisions.views import LinkView
from tests.gateway.test_bookings import node_of

GB = 1e9
WEST = LinkLoad(
    peer="west", available_bytes_per_s=GB, utilisation=0.0, retransmit_ratio=0.0, rtt_s=0.0, min_rtt_s=0.0,
    congested=False, queued_bytes=0, estimate_error=0.0,
)  # fmt: skip


def sender(name: str, *links: LinkLoad) -> Node:
    node = node_of(name, "east", "prfaas")
    node.load = NodeLoad(links=links)
    return node


def line_of(*senders: Node) -> LinkView:
    (line,) = link_views([*senders, node_of("d0", role="decode")], 0.0)
    return line


def test_three_idle_senders_see_one_line():
    assert line_of(*(sender(f"r{i}", WEST) for i in range(3))).available_bytes_per_s == GB


def test_a_sender_that_has_sent_nothing_yet_says_nothing_of_the_line():
    line = line_of(sender("r0", replace(WEST, budget_bytes_per_s=GB / 10)), sender("r1"))
    assert (line.available_bytes_per_s, line.budget_bytes_per_s) == (GB, GB / 10)


def test_a_line_nobody_has_measured_is_as_wide_as_the_configuration_says():
    nodes = [sender("r0"), node_of("d0", role="decode")]
    assert [view.available_bytes_per_s for view in link_views(nodes, 0.0)] == [None]
    assert [view.available_bytes_per_s for view in link_views(nodes, 5.0)] == [5.0]


def test_promises_are_those_of_the_destination_less_what_is_queued():
    first, second = sender("r0", replace(WEST, queued_bytes=30)), sender("r1")
    for node in (first, second):
        node.take(Work(destination="west", promised_bytes=100))
    views = link_views([first, second, node_of("d0", role="decode"), node_of("d1", "north", role="decode")], 0.0)
    assert {view.destination: view.promised_bytes for view in views} == {"west": 170, "north": 0}
