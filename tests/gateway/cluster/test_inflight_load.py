"""What is booked is given back, whatever becomes of the requests."""

from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import FreeRoom, NodeInfo, NodeLoad
from gateway.cluster.inflight_load import Booking, booked
from gateway.cluster.inflight_prefixes import UNTOLD_S
from gateway.cluster.node import ClusterNode
from hybrid_cache.index.index import NOTHING
from planner.decisions.routing.offload import Reason, Route, Target


def node_of(node_id: str, cluster: str = "west", kind: str = "pd", role: str = "prefill") -> ClusterNode:
    node = ClusterNode(cast(AgentClient, None))
    node.info = NodeInfo(
        node_id=node_id, cluster=cluster, cluster_kind=kind, role=role, state="ready", engine_url="", model_id="m",
        layout_json="", layout_fingerprint="", max_model_len=1, boot_id="1",
    )  # fmt: skip
    node.connected = True
    return node


def route_of(uncached_tokens: int = 100, link_bytes: float = 0.0) -> Route:
    return Route(
        target=Target.REMOTE, reason=Reason.LONG, decode_node="d0", prefill_node="r0", uncached_tokens=uncached_tokens,
        cached_tokens=0, threshold_tokens=10.0, compute_s=0.5, link_bytes=link_bytes,
    )  # fmt: skip


def test_what_is_booked_is_seen_at_once_and_moves_with_the_prefill():
    decode, first, second = node_of("d0"), node_of("r0", "east", "prfaas"), node_of("p0")
    with booked(decode, lambda: 0.0) as booking:
        booking.prefill(first, route_of(100, 5_000.0))
        assert (decode.pending_requests, first.pending_tokens, first.promised_bytes) == (1, 100, {"west": 5_000})
        booking.prefill(second, route_of(100, 5_000.0))
        assert (first.pending_requests, first.pending_tokens, first.promised_bytes) == (0, 0, {})
        assert (second.pending_requests, second.pending_tokens, second.promised_bytes) == (1, 100, {})
        booking.prefilled()
        assert (decode.pending_requests, second.pending_tokens) == (1, 0)
    assert decode.pending_requests == 0


def test_a_prompt_that_the_decode_node_computes_is_one_request_there():
    decode = node_of("d0")
    with booked(decode, lambda: 0.0) as booking:
        booking.prefill(decode, route_of(60))
        assert (decode.pending_requests, decode.pending_tokens) == (1, 60)
        assert decode.prefill_share.at(0.0) == pytest.approx(0.05)  # half a second of the last ten
    assert (decode.pending_requests, decode.pending_tokens) == (0, 0)


def test_what_was_sent_since_the_last_two_reports_takes_room_that_they_do_not_show():
    decode = node_of("d0", role="decode")
    decode.info = replace(decode.info, block_size=16)
    report = NodeLoad(room=FreeRoom(pages_total=9, pages_free=4, pages_evictable=4, free_tokens=64, tokens=128))

    def room():
        return decode.view(NOTHING, 16, 0.0).room_tokens

    assert room() is None
    decode.reported(report)
    assert room() == 128
    with booked(decode, lambda: 0.0, [b"h" * 32] * 2):
        assert room() == 96
        decode.reported(report)
        assert room() == 96
        decode.reported(report)
        assert room() == 128
    with booked(
        decode, lambda: 0.0, [b"h" * 32] * 2, held_tokens=16
    ):  # pages of what is there already are not taken again
        assert room() == 112


Step = tuple[int, int, int, float]  # which request, what it does, by which node, how much


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(0, 4), st.floats(0, 1e12)), max_size=60))
def test_nothing_leaks(steps: list[Step]) -> None:
    nodes = [
        node_of("d0"),
        node_of("d1"),
        node_of("p0"),
        node_of("r0", "east", "prfaas"),
        node_of("r1", "east", "prfaas"),
    ]
    open_bookings: dict[int, tuple[Booking, ExitStack]] = {}
    answered: set[int] = set()
    landing: set[int] = set()
    for request, act, at, amount in steps:
        if request not in open_bookings:
            stack = ExitStack()
            open_bookings[request] = stack.enter_context(booked(nodes[request % 2], lambda: 0.0, [b"h" * 32])), stack
        booking, stack = open_bookings[request]
        if act == 0:
            booking.prefill(nodes[at], route_of(int(amount) % 10_000, amount))
        elif act == 1:
            booking.prefilled(is_computed=bool(at % 2))
        elif act == 2:
            booking.answered()
            answered.add(request)
        elif act == 3 and request not in landing:  # decided once
            booking.lands(route_of())
            landing.add(request)
        elif act == 4:
            booking.landed(has_landed=bool(at % 2))
        else:
            stack.close()
            del open_bookings[request]
            answered.discard(request)
            landing.discard(request)
        assert sum(node.pending_requests for node in nodes) >= len(open_bookings.keys() - answered)
        assert all(min(node.pending_requests, node.pending_tokens) >= 0 for node in nodes)
    for _, stack in open_bookings.values():
        stack.close()
    assert [(node.pending_requests, node.pending_tokens, node.promised_bytes) for node in nodes] == [(0, 0, {})] * 5
    for node in nodes:
        assert not len(node.underway)
        node.underway.settle(UNTOLD_S)  # and then none is promised on, either
    assert not any(node.arrivals or node.underway.by_end for node in nodes)


def test_an_engine_that_has_said_all_is_given_no_more_work():
    decode = node_of("d0")
    with booked(decode, lambda: 0.0) as booking:
        booking.prefill(node_of("r0", "east", "prfaas"), route_of())
        booking.answered()
        booking.prefill(decode, route_of(60))  # the prefill failed later, its decode node had not waited for it
        assert (decode.pending_requests, decode.pending_tokens, decode.prefill_share.at(0.0)) == (0, 0, 0.0)


def test_who_goes_on_from_a_prompt_under_way_waits_for_it_on_that_node_alone():
    decode, first, second = node_of("d0"), node_of("r0"), node_of("p0")
    for node in (first, second):
        node.info = replace(node.info, block_size=16) if node.info else None
    a, b = b"a", b"b"
    with booked(decode, lambda: 0.0, [a]) as leader, booked(decode, lambda: 0.0, [a, b]) as follower:
        leader.prefill(first, route_of())
        follower.prefill(first, replace_route(route_of(), 16))
        awaited = follower.awaited
        assert awaited is not None
        assert leader.awaited is None
        leader.prefill(first, route_of())  # as its leg begins
        assert not awaited.done.is_set()
        follower.prefill(second, replace_route(route_of(), 16))
        assert follower.awaited is None
        assert len(second.underway) == 1
        leader.prefilled()
        assert awaited.done.is_set()
    assert not len(first.underway)
    assert not len(second.underway)


def replace_route(route: Route, cached_tokens: int) -> Route:
    return msgspec.structs.replace(route, cached_tokens=cached_tokens)


def test_nobody_waits_for_a_prompt_that_is_there_already():
    prefill = node_of("r0")
    assert prefill.info is not None
    prefill.info = replace(prefill.info, block_size=16)
    hashes = [b"a" * 32, b"b" * 32]
    cached = msgspec.structs.replace(route_of(), cached_tokens=2 * 16)
    with booked(node_of("d0"), lambda: 0.0, hashes) as one, booked(node_of("d1"), lambda: 0.0, hashes) as other:
        one.prefill(prefill, cached)
        other.prefill(prefill, cached)
        assert (one.awaited, other.awaited) == (None, None)
