"""One line of several senders, as it is seen here; what a dead one costs, and how it comes back."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gateway.cluster.agent_values import LinkLoad, NodeLoad
from gateway.cluster.links import FEW_SENDERS, RENEWED_S, ClusterLinks, is_path_failure
from gateway.cluster.node import ClusterNode, NodeWork
from membership.lines import Line
from planner.decisions.views import LinkView
from tests.gateway.cluster.test_inflight_load import node_of
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.worlds import on_loop, until, world
from transport.control.proto import node_pb2 as pb

GB = 1e9
LONG = "the quick brown fox jumps over the lazy dog " * 40
WEST = LinkLoad(
    peer="west", available_bytes_per_s=GB, utilisation=0.0, retransmit_ratio=0.0, rtt_s=0.0, min_rtt_s=0.0,
    congested=False, queued_bytes=0, estimate_error=0.0,
)  # fmt: skip


def sender(name: str, *links: LinkLoad) -> ClusterNode:
    node = node_of(name, "east", "prfaas")
    node.load = NodeLoad(links=links)
    return node


def a_line(to: str, gbps: float, name: str = "") -> Line:
    return Line(source="east", destination=to, name=name, capacity_gbps=gbps)


def line_of(*senders: ClusterNode) -> LinkView:
    (line,) = ClusterLinks([*senders, node_of("d0", role="decode")], lambda: 0.0).views()
    return line


def test_three_idle_senders_see_one_line():
    assert line_of(*(sender(f"r{i}", WEST) for i in range(3))).available_bytes_per_s == GB


def test_a_sender_that_has_sent_nothing_yet_says_nothing_of_the_line():
    line = line_of(sender("r0", replace(WEST, budget_bytes_per_s=GB / 10)), sender("r1"))
    assert (line.available_bytes_per_s, line.budget_bytes_per_s) == (GB, GB / 10)


@pytest.mark.parametrize(("inflated", "seen"), [(True, 5.0), (False, 1.0)])
def test_longer_round_trips_are_a_queue_only_where_their_sender_says_so(inflated: bool, seen: float) -> None:
    load = replace(WEST, congested=True, inflated=inflated, rtt_s=0.2, min_rtt_s=0.04)
    assert line_of(sender("r0", load)).rtt_inflation == seen


@pytest.mark.parametrize(("configured", "seen"), [(0.0, None), (5.0, 5.0)])
def test_a_line_nobody_has_measured_is_as_wide_as_the_configuration_says(configured: float, seen: float | None) -> None:
    (line,) = ClusterLinks([sender("r0"), node_of("d0", role="decode")], lambda: 0.0, configured).views()
    assert (line.up, line.available_bytes_per_s) == (True, seen)


def test_a_line_nobody_has_measured_is_as_wide_as_its_description():
    nodes = [sender("r0"), node_of("d0", role="decode")]
    lines = [a_line("west", 8, "a"), a_line("west", 16, "b")]
    (line,) = ClusterLinks(nodes, lambda: 0.0, 5.0, lines=lines).views()
    assert line.available_bytes_per_s == 3 * GB


def test_described_lines_show_what_they_carry_of_a_link():
    links = ClusterLinks(
        [sender("r0", replace(WEST, utilisation=0.7)), node_of("d0", role="decode")],
        lambda: 0.0,
        lines=[a_line("west", 8, "a"), a_line("far", 1)],
        expected=[("east", "far")],
    )
    status = {each.destination: each for each in links.status()}
    (a,), (far,) = status["west"].lines, status["far"].lines
    assert (a.name, a.used_ratio, a.level) == ("a", pytest.approx(0.7), "warn")
    assert (far.name, far.carried_bytes_per_s, far.level) == ("east:far", 0, "ok")


def test_promises_are_those_of_the_destination_less_what_is_queued():
    first, second = sender("r0", replace(WEST, queued_bytes=30)), sender("r1")
    for node in (first, second):
        node.take(NodeWork(destination="west", promised_bytes=100))
    nodes = [first, second, node_of("d0", role="decode"), node_of("d1", "north", role="decode")]
    promised = {view.destination: view.promised_bytes for view in ClusterLinks(nodes, lambda: 0.0).views()}
    assert promised == {"west": 170, "north": 0}


def test_a_failure_is_of_the_line_to_one_cluster_and_a_sender_comes_back_alone():
    now = 0.0
    nodes = [
        sender("r0", WEST),
        sender("r1", WEST),
        node_of("d0", role="decode"),
        node_of("d1", "north", role="decode"),
    ]
    links = ClusterLinks(nodes, lambda: now)
    links.failed(nodes[0], nodes[2])
    assert {view.destination: view.up for view in links.views()} == {"west": False, "north": True}
    assert not links.is_up(nodes[1], nodes[2])  # it shares the line
    assert links.is_up(nodes[0], nodes[3])
    now = 1.0
    assert [(each, receivers) for each, receivers in links.probes()] == [(nodes[0], [nodes[2]]), (nodes[1], [nodes[2]])]
    links.still_down(nodes[0], nodes[2])
    links.arrived(nodes[1], nodes[2])
    west = next(view for view in links.views() if view.destination == "west")
    assert (west.up, west.cut_off) == (True, ("r0",))


def test_another_receiver_that_answers_puts_the_line_back_and_leaves_out_the_pair_alone():
    now = 0.0
    r0, r1, d0, d1 = nodes = [sender("r0"), sender("r1"), node_of("d0", role="decode"), node_of("d1", role="decode")]
    links = ClusterLinks(nodes, lambda: now)
    links.failed(r0, d0)
    now = 1.0
    assert links.probes() == [(r0, [d1, d0]), (r1, [d1, d0])]
    links.arrived(r0, d1)
    links.arrived(r1, d1)
    (line,) = links.views()
    assert (line.up, line.cut_off, line.lost) == (True, (), (("r0", "d0"), ("r1", "d0")))
    assert not links.is_up(r0, d0)
    assert links.is_up(r0, d1)
    links.failed(r0, d0)  # what had left before
    assert links.views()[0].up
    now = 2.0
    assert links.probes() == [(r0, [d0]), (r1, [d0])]
    links.still_down(r0, d0)
    links.arrived(r1, d0)  # to it nothing had been lost
    assert links.views()[0].lost == (("r0", "d0"),)
    assert links.cut_off_from("d0") == {"r0"}
    now = 4.0
    assert links.probes() == [(r0, [d0])]
    links.arrived(r0, d0)
    assert links.views()[0].lost == ()


def test_pairs_of_nodes_that_are_gone_for_good_are_forgotten():
    r0, d0, d1 = nodes = [sender("r0"), node_of("d0", role="decode"), node_of("d1", role="decode")]
    links = ClusterLinks(nodes, lambda: 0.0)
    links.failed(r0, d0)
    links.arrived(r0, d1)
    assert links.views()[0].lost == (("r0", "d0"),)
    d0.info = node_of("d2", role="decode").info
    links.probes()
    assert links.cut_off_from("d0") == set()


def test_senders_that_are_gone_for_good_are_forgotten():
    nodes = [sender("r0"), sender("r1"), node_of("d0", role="decode")]
    links = ClusterLinks(nodes, lambda: 0.0)
    for number in range(
        3
    ):  # the first address gets a new node each time, as under an orchestrator that names them anew
        nodes[0].info = sender(f"r0-{number}").info
        links.failed(nodes[0], nodes[2])
        links.probes()
    assert links.num_failed == 2


def test_a_receiver_that_is_gone_itself_says_nothing_of_the_way():
    first, receiver, engine = sender("r0"), node_of("d0", role="decode"), ("1", 0)
    assert is_path_failure("peer_lost", first, receiver, engine)
    assert not is_path_failure("no_capacity", first, receiver, engine)
    assert not is_path_failure("peer_lost", first, receiver, ("an earlier start", 0))
    assert not is_path_failure("peer_lost", node_of("p0"), receiver, engine)
    receiver.connected = False
    assert not is_path_failure("peer_lost", first, receiver, engine)


async def routes(w: Pipelined, count: int, first: int = 0) -> list[str]:
    """Of prompts `first` and so on; where one has been computed it is known to be."""
    answers = await asyncio.gather(*(w.complete(f"{i} {LONG}") for i in range(first, first + count)))
    assert [answer.status for answer in answers] == [200] * count
    return [answer.headers["x-prfaas-route"] for answer in answers]


@on_memory_loop
async def test_a_dead_link_costs_one_request_its_patience_and_then_nobody_until_it_is_back() -> None:
    async with pipeline(remote=3, local=2, decode=1) as w:
        for node in w.nodes.remote:
            node.script.path_is_down = True
        (first,) = await routes(w, 1)
        assert "fallback=prefill_peer_lost" in first
        for route in await routes(w, 8, first=1):  # by nodes of the same line that had not failed, too
            assert route.startswith("local; node=p")
            assert route.endswith("reason=link_down")
        assert sum(len(node.bodies) for node in w.nodes.remote) == 1
        assert all(node.bodies for node in w.nodes.local)
        assert await w.fallbacks() == {"prefill_peer_lost": 1.0}
        await until(lambda: all(node.probes for node in w.nodes.remote))
        assert not w.links.views()[0].up
        assert 'prfaas_link_failures_total{destination="west",source="east"} 1.0' in await w.metrics()
        for node in w.nodes.remote:
            node.script.path_is_down = False
        await until(lambda: not w.links.views()[0].cut_off)
        assert [route.split(";")[0] for route in await routes(w, 3, first=9)] == ["remote"] * 3
        assert 'prfaas_link_senders{destination="west",source="east",state="closed"} 3.0' in await w.metrics()
        assert sum(len(node.bodies) for node in w.nodes.remote) == 1 + 3  # no prompt was a probe
        await w.settled()


@on_memory_loop
async def test_a_sender_that_alone_is_cut_off_stays_out_alone() -> None:
    async with pipeline(remote=2, local=1, decode=1) as w:
        cut_off = w.nodes.remote[0]
        cut_off.script.path_is_down = True
        await routes(w, 1)
        await until(lambda: w.links.views()[0].up)
        assert w.links.views()[0].cut_off == ("r0",)
        for route in await routes(w, 4):
            assert route.startswith("remote; node=r1;")
        async with w.http.get("/prfaas/links") as answer:
            (link,) = json.loads(await answer.text())["data"]
        assert (link["up"], link["senders"]["r1"]) == (True, "closed")
        assert link["senders"]["r0"] in ("open", "half_open")


@on_memory_loop
async def test_a_decode_node_that_alone_is_cut_off_is_left_out_and_the_others_have_the_link() -> None:
    async with pipeline(remote=2, local=1, decode=2) as w:
        for node in w.nodes.remote:
            node.script.not_reached = ("d0",)
        (first,) = await routes(w, 1)  # of equals, the first decode node
        assert "fallback=prefill_peer_lost" in first
        await until(lambda: not w.links.views()[0].cut_off)
        assert set(w.links.views()[0].lost) == {("r0", "d0"), ("r1", "d0")}
        for route in await routes(w, 4):
            assert route.startswith("remote;")
            assert "fallback" not in route
        async with w.http.get("/prfaas/links") as answer:
            (link,) = json.loads(await answer.text())["data"]
        assert sorted(link["lost"]) == [["r0", "d0"], ["r1", "d0"]]  # they were probed at once
        for node in w.nodes.remote:
            node.script.not_reached = ()
        await until(lambda: not w.links.views()[0].lost)
        await w.settled()


@on_memory_loop
async def test_a_sender_without_probes_is_not_left_out_for_ever() -> None:
    async with pipeline(remote=1, local=1, decode=1) as w:
        (old,) = w.nodes.remote
        old.script.path_is_down = old.script.knows_no_probes = True
        (route,) = await routes(w, 1)
        assert "fallback=prefill_peer_lost" in route
        old.script.path_is_down = False
        await until(lambda: w.links.views()[0].up)
        (route,) = await routes(w, 1)
        assert route.startswith("remote;")


def status_of(links: ClusterLinks) -> dict[str, object]:
    (status,) = links.status()
    return {"up": status.up, "drained": status.drained, "senders": dict(status.senders)}


def test_a_link_whose_senders_have_all_fallen_silent_is_still_there_and_dead():
    r0, r1, d0 = sender("r0", WEST), sender("r1", WEST), node_of("d0", role="decode")
    links = ClusterLinks([r0, r1, d0], lambda: 0.0)
    r1.connected = False
    assert status_of(links) == {"up": True, "drained": False, "senders": {"r0": "closed", "r1": "unheard"}}
    r0.connected = False
    assert status_of(links) == {"up": False, "drained": False, "senders": {"r0": "unheard", "r1": "unheard"}}
    d0.connected = False
    assert len(links.status()) == 1
    r0.connected = d0.connected = True
    assert status_of(links)["up"]


def test_a_link_that_is_configured_is_missed_before_anybody_of_it_is_heard_of():
    d0 = node_of("d0", role="decode")
    links = ClusterLinks([d0], lambda: 0.0, expected=[("east", "west")])
    assert status_of(links) == {"up": False, "drained": False, "senders": {}}
    links.drain(frozenset({("east", "west")}))
    assert status_of(links) == {"up": False, "drained": True, "senders": {}}


@on_loop
async def test_a_dead_link_is_told_to_operators_and_long_prompts_stay_at_home() -> None:
    async with world(remote=1, links=("east:west", "north:west")) as w:
        assert 'prfaas_link_up{destination="west",source="east"} 1.0' in await w.metrics()
        assert 'prfaas_link_up{destination="west",source="north"} 0.0' in await w.metrics()
        (node,) = w.nodes.remote
        await node.stop_agent()
        await until(lambda: any(not each.up for each in w.gateway.links.status() if each.source == "east"))
        page = await w.metrics()
        assert 'prfaas_link_up{destination="west",source="east"} 0.0' in page
        assert 'prfaas_link_senders{destination="west",source="east",state="unheard"} 1.0' in page
        async with w.http.get("/prfaas/links") as answer:
            shown = {each["source"]: each["up"] for each in (await answer.json())["data"]}
        assert shown == {"east": False, "north": False}
        async with w.http.get("/prfaas/console") as answer:
            assert [link["status"]["up"] for link in (await answer.json())["links"]] == [False, False]
        assert (await w.complete(LONG)).headers["x-prfaas-route"].startswith(("local;", "decode;"))


def budgeted(name: str, *links: LinkLoad, **budgets: float) -> ClusterNode:
    node = sender(name)
    node.load = NodeLoad(links=links, budgets={"": 0.0, **budgets})
    return node


def test_a_budget_counts_once_for_each_sender_of_the_line_and_silent_ones_count():
    full = replace(WEST, available_bytes_per_s=GB, budget_bytes_per_s=GB, own_budget_bytes_per_s=GB, utilisation=1.0)
    nodes = [budgeted("r0", full, west=GB), budgeted("r1", west=GB), budgeted("r2", west=2 * GB)]
    line = line_of(*nodes)
    assert (line.budget_bytes_per_s, line.utilisation) == (4 * GB, 0.25)
    assert {name: own.budget_bytes_per_s for name, own in line.senders} == {"r0": GB, "r1": GB, "r2": 2 * GB}
    assert [own.utilisation for _, own in line.senders] == [1.0, 0.0, 0.0]
    unlimited = line_of(*nodes, budgeted("r3"))
    assert (unlimited.budget_bytes_per_s, unlimited.senders) == (None, ())


def test_a_sender_that_its_budget_holds_back_carries_what_that_allows():
    """It measures no bandwidth."""
    held = replace(WEST, available_bytes_per_s=0.0, budget_bytes_per_s=GB, own_budget_bytes_per_s=GB, utilisation=0.9)
    lines = (a_line("west", 100.0, "a"),)
    nodes = [budgeted("r0", held, west=GB), node_of("d0", role="decode")]
    (status,) = ClusterLinks(nodes, lambda: 0.0, lines=lines).status()
    assert status.utilisation == 0.9
    assert status.lines[0].carried_bytes_per_s == 0.9 * GB


def test_shares_of_a_moment_are_not_the_lines_budget():
    def part(share: float, utilisation: float) -> LinkLoad:
        return replace(
            WEST,
            available_bytes_per_s=share,
            budget_bytes_per_s=share,
            own_budget_bytes_per_s=GB,
            utilisation=utilisation,
        )

    nodes = [budgeted("r0", part(1.75 * GB, 1.0), west=GB), budgeted("r1", part(0.25 * GB, 0.0), west=GB)]
    links = ClusterLinks([*nodes, node_of("d0", role="decode")], lambda: 0.0, is_budget_shared=True)
    (line,) = links.views()
    assert (line.budget_bytes_per_s, line.available_bytes_per_s, line.senders) == (2 * GB, 2 * GB, ())
    assert line.utilisation == 1.75 / 2


@on_memory_loop
async def test_of_two_senders_with_budgets_of_their_own_the_idle_one_sends() -> None:
    async with pipeline(remote=2, local=1) as w:
        busy, idle = w.nodes.remote
        for node, queued in ((busy, 40_000_000_000), (idle, 0)):
            link = pb.Link(
                peer="west", available_bytes_per_s=1e9, budget_bytes_per_s=1e9, own_budget_bytes_per_s=1e9,
                queued_bytes=queued, utilisation=bool(queued), congested=bool(queued),
            )  # fmt: skip
            node.load = pb.Load(links=[link], budgets={"west": 1e9})
        await until(lambda: w.links.views()[0].queued_bytes > 0)
        await until(lambda: w.links.views()[0].budget_bytes_per_s == 2e9)  # both have reported
        answers = [await w.complete(f"{number} {LONG}") for number in range(4)]
        assert {answer.headers["x-prfaas-route"].partition(";")[0] for answer in answers} == {"remote"}
        assert {record["prefill_node"] for record in await w.records()} == {idle.node_id}


def test_round_trips_are_shown_as_they_are_measured_and_weighed_as_far_as_they_are_a_queue():
    load = replace(WEST, rtt_s=0.09, min_rtt_s=0.00001)
    silent = budgeted("r0", west=0.0)
    links = ClusterLinks([silent, sender("r1", load), sender("r2", WEST), node_of("d0", role="decode")], lambda: 0.0)
    (status,) = links.status()
    assert (status.rtt_s, status.min_rtt_s) == (0.09, 0.00001)
    assert links.views()[0].rtt_s == 0.00001


def test_a_node_that_has_not_been_heard_is_not_probed_in_place_of_one_whose_name_it_is_listed_by() -> None:
    now = 0.0
    receiver = node_of("d0", role="decode")
    receiver.connected = True
    listed = ClusterNode(receiver.agent, "d0")
    origin = sender("r0", WEST)
    links = ClusterLinks([origin, receiver, listed], lambda: now)
    links.failed(origin, receiver)
    now = 60.0
    (probe,) = links.probes()
    assert probe == (origin, [receiver])


@pytest.mark.parametrize(("senders", "waits"), [(FEW_SENDERS, False), (FEW_SENDERS + 1, True)])
def test_reports_of_a_line_with_many_senders_count_a_moment_later(senders: int, waits: bool) -> None:
    now = 0.0
    nodes = [sender(f"r{i}", WEST) for i in range(senders)]
    links = ClusterLinks([*nodes, node_of("d0", role="decode")], lambda: now)

    def queued() -> float:
        (line,) = links.views()
        return line.queued_bytes

    assert queued() == 0
    nodes[0].load = NodeLoad(links=(replace(WEST, queued_bytes=7),))
    assert queued() == (0 if waits else 7)
    now = RENEWED_S
    assert queued() == 7


def test_promises_and_losses_of_a_line_with_many_senders_count_at_once() -> None:
    nodes = [sender(f"r{i}", WEST) for i in range(FEW_SENDERS + 2)]
    links = ClusterLinks([*nodes, node_of("d0", role="decode")], lambda: 0.0)
    assert links.views()[0].promised_bytes == 0
    nodes[3].promised_bytes["west"] = 9
    assert links.views()[0].promised_bytes == 9
    for node in nodes:
        node.connected = False
    assert not links.views()[0].up


class CountedNodes(list[ClusterNode]):
    """Nodes, and how often all of them were looked at."""

    looks = 0

    def __iter__(self) -> Iterator[ClusterNode]:
        self.looks += 1
        return super().__iter__()


def test_links_are_shown_with_as_many_looks_at_the_fleet_however_many_there_are():
    def looks(clusters: int) -> int:
        nodes = CountedNodes()
        for number in range(clusters):
            nodes += [
                node_of(f"r{number}", f"east{number}", "prfaas"),
                node_of(f"d{number}", f"pd{number}", role="decode"),
            ]
        shown = ClusterLinks(nodes, lambda: 0.0).status()
        assert len(shown) == clusters**2
        assert {tuple(each.senders) for each in shown if each.source == "east0"} == {("r0",)}
        return nodes.looks

    assert looks(2) == looks(8)
