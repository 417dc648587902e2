"""Reservations in unlucky moments: pages go back once, and never while an engine reads them."""

import asyncio
from pathlib import Path

import pytest

from node.errors import NodeRefusal
from tests.pd_cluster.handover import TOKENS, landed, lent, run, two_nodes
from transport.control.proto import node_pb2 as pb


def test_commit_knows_what_was_committed_and_what_never_arrived(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = await landed(prefill, decode)
            for _ in range(2):
                await decode.incoming.commit(ticket.transfer_id, 1.0)
            aborted = decode.reserve(TOKENS)
            decode.incoming.abort(aborted.transfer_id, "client_gone")
            for transfer_id in (aborted.transfer_id, "never heard of"):
                with pytest.raises(NodeRefusal):
                    await decode.incoming.commit(transfer_id, 1.0)

    run(scenario())


def test_an_abort_that_meets_the_last_byte_frees_the_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            landing = decode.incoming.entries[ticket.transfer_id].landing
            assert landing is not None
            prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
            while landing.bytes_landed < landing.bytes_total:
                pass  # keeps the loop from hearing of it: the landing is complete, its owner does not know yet
            assert decode.incoming.abort(ticket.transfer_id, "client_gone")
            prefill.end("job")

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.ReserveRequest(num_tokens=0), "bad_request"),
        (pb.ReserveRequest(num_tokens=1 << 63), "bad_request"),
        (pb.ReserveRequest(num_tokens=20, block_hashes=b"short"), "bad_request"),
        (pb.ReserveRequest(num_tokens=20, block_hashes=bytes(64)), "bad_request"),
        (pb.ReserveRequest(num_tokens=20, prefix_only=True), "bad_request"),
        (pb.ReserveRequest(num_tokens=1_000_000), "no_capacity"),
    ],
)
def test_reservations_that_cannot_be_are_refused_and_counted(
    tmp_path: Path, request_: pb.ReserveRequest, reason: str
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            with pytest.raises(NodeRefusal) as caught:
                decode.reserve_pages(request_)
            assert caught.value.label == reason
            assert decode.incoming.counts.refused == {reason: 1}

    run(scenario())


def test_a_reservation_that_cannot_be_expected_holds_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            await asyncio.to_thread(decode.listener.close)
            with pytest.raises(NodeRefusal):
                decode.reserve(TOKENS)

    run(scenario())


def test_the_room_told_is_what_is_free_and_what_eviction_would_free(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            empty = decode.pages.room()
            assert (empty.pages_free, empty.pages_evictable) == (empty.pages_total, 0)
            ticket = await landed(prefill, decode)
            held = decode.pages.room()
            assert held.tokens == held.free_tokens < empty.tokens
            await decode.incoming.commit(ticket.transfer_id, 1.0)
            kept = decode.pages.room()
            assert kept.free_tokens < kept.tokens == empty.tokens
            assert kept.pages_free + kept.pages_evictable == kept.pages_total

    run(scenario())
