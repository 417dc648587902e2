"""Proto messages become values, once."""

import grpc
import pytest

from gateway.cluster.agent_client import node_error
from gateway.cluster.agent_values import (
    MAX_EVENT_HASHES,
    BookingsBeside,
    NodeInfo,
    NodeLoad,
    events_from,
    granted_from,
    hashes_in,
)
from gateway.errors import unheard
from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from hybrid_cache.index.digest import DigestPart
from transport.control.proto import node_pb2 as pb

A, B = b"a" * 32, b"b" * 32


def test_a_snapshot_voids_what_was_known_and_comes_in_bounded_parts() -> None:
    many = [number.to_bytes(32) for number in range(MAX_EVENT_HASHES + 1)]
    groups = [pb.BlocksStored(group=0, hashes=b"".join(many)), pb.BlocksStored(group=1, hashes=A)]
    first, *parts = events_from(pb.NodeEvent(snapshot=pb.CacheSnapshot(groups=groups)))
    assert first == CacheCleared()
    assert parts == [
        BlocksStored(0, tuple(many[:MAX_EVENT_HASHES])),
        BlocksStored(0, tuple(many[MAX_EVENT_HASHES:])),
        BlocksStored(1, (A,)),
    ]


def test_changes_and_loads_are_values() -> None:
    stored, removed = pb.BlocksStored(group=2, hashes=A + B), pb.BlocksRemoved(group=1, hashes=B)
    assert list(events_from(pb.NodeEvent(stored=stored))) == [BlocksStored(2, (A, B))]
    assert list(events_from(pb.NodeEvent(removed=removed))) == [BlocksRemoved(1, (B,))]
    assert list(events_from(pb.NodeEvent(load=pb.Load(running=3)))) == [NodeLoad(running=3)]
    assert list(events_from(pb.NodeEvent())) == []


def test_several_events_in_a_message_are_taken_in_their_order() -> None:
    stored, removed = pb.BlocksStored(hashes=A), pb.BlocksRemoved(group=1, hashes=B)
    several = [pb.NodeEvent(stored=stored), pb.NodeEvent(removed=removed), pb.NodeEvent(load=pb.Load(running=3))]
    heard = list(events_from(pb.NodeEvent(several=pb.NodeEvents(events=several))))
    assert heard == [BlocksStored(0, (A,)), BlocksRemoved(1, (B,)), NodeLoad(running=3)]
    assert [hashes_in(event) for event in heard] == [1, 1, 0]
    assert hashes_in(DigestPart(0, Medium.MEMORY, (b"1234",), (b"5678", b"9abc"))) == 3


def test_a_description_and_loads_in_a_message_are_one_report() -> None:
    description = pb.NodeDescription(node_id="n", load=pb.Load(running=7))
    said = [
        pb.NodeEvent(load=pb.Load(running=5)),
        pb.NodeEvent(description=description),
        pb.NodeEvent(stored=pb.BlocksStored(hashes=A)),
        pb.NodeEvent(load=pb.Load(running=8)),
    ]
    info, *rest = events_from(pb.NodeEvent(several=pb.NodeEvents(events=said)))
    assert isinstance(info, NodeInfo)
    assert rest == [BlocksStored(0, (A,)), NodeLoad(running=8)]
    _, load, stored = events_from(pb.NodeEvent(several=pb.NodeEvents(events=said[:3])))
    assert (load, stored) == (NodeLoad(running=7), BlocksStored(0, (A,)))


def test_a_description_is_who_the_node_is_and_how_busy() -> None:
    message = pb.NodeDescription(
        node_id="n", state=pb.NODE_STATE_DRAINING, engine_url="http://h:1/", load=pb.Load(waiting=2)
    )
    info, load = events_from(pb.NodeEvent(description=message))
    assert isinstance(info, NodeInfo)
    assert (info.node_id, info.state, info.engine_url) == ("n", "draining", "http://h:1")
    assert load == NodeLoad(waiting=2)
    assert info.has_own_cache  # for all that an earlier version says
    message.own_cache = False
    (info, _) = events_from(pb.NodeEvent(description=message))
    assert isinstance(info, NodeInfo)
    assert not info.has_own_cache


def test_hashes_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="32-byte"):
        list(events_from(pb.NodeEvent(removed=pb.BlocksRemoved(group=0, hashes=b"x" * 33))))


@pytest.mark.parametrize(
    ("code", "metadata", "reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (), "no_capacity"),
        (grpc.StatusCode.UNAVAILABLE, (), "unreachable"),
        (grpc.StatusCode.UNAVAILABLE, (("prfaas-reason", "draining"),), "draining"),
        (grpc.StatusCode.UNIMPLEMENTED, (), "unimplemented"),
    ],
)
def test_a_failed_call_has_the_label_its_node_gave_it(
    code: grpc.StatusCode, metadata: tuple[tuple[str, str], ...], reason: str
) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(code, nothing, grpc.aio.Metadata(*metadata), details="why")
    assert node_error("host:1", error).reason == reason


def test_a_gateway_that_was_stopped_takes_no_node_for_silent() -> None:
    assert unheard("a:1", 10.0, late_s=0.01).reason == "silent"
    assert unheard("a:1", 10.0, late_s=5.0).reason == "not_listened"  # by which nothing is given up


def test_the_answer_to_reserve_says_what_others_have_there_unless_the_node_is_too_old() -> None:
    ticket = pb.Ticket(transfer_id="t", others=pb.Bookings(requests=3, clock_s=7.0))
    granted = granted_from(ticket)
    assert (granted.ticket.transfer_id, granted.beside) == ("t", BookingsBeside(requests=3, clock_s=7.0))
    assert granted_from(pb.Ticket(transfer_id="t")).beside is None
