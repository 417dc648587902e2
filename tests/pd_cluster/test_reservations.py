"""Reservations for decode: which are awaited, which are held, and what may be reused of them."""

import asyncio
from pathlib import Path

import pytest

from node.coding import Coding
from node.errors import NodeRefusal
from node.kvcache.pages import ArenaPages
from pd_cluster.reservations import DecodePages, DecodeUse
from tests.pd_cluster.handover import TOKENS, landed, run, two_nodes
from transport.control.proto import node_pb2 as pb


def test_a_reservation_that_waits_for_an_ssd_is_expected_already(tmp_path: Path) -> None:
    async def scenario() -> None:
        asked = asyncio.Event()

        class PagesAboveStuckDisk(ArenaPages):
            async def prepare_landing(self, joined_hashes: bytes, num_tokens: int, tenant: str) -> None:
                asked.set()
                await asyncio.Event().wait()

        async with two_nodes(tmp_path, pages=PagesAboveStuckDisk) as (_, decode):
            for prefix_only in (False, True):
                asked.clear()
                request = pb.ReserveRequest(num_tokens=16, block_hashes=bytes(32), prefix_only=prefix_only)
                reserving = asyncio.create_task(decode.reserve_settled(request))
                await asked.wait()
                assert decode.landings.expects_decodes is not prefix_only
                reserving.cancel()
                await asyncio.wait([reserving])
                assert not decode.landings.expects_decodes

    run(scenario())


@pytest.mark.parametrize(
    ("accept", "reuse", "exact", "lossy_is_reusable"),
    [(False, False, True, False), (True, False, False, False), (True, True, False, True)],
)
def test_quantised_kvcache_serves_its_own_request_unless_others_may_have_it(
    accept: bool, reuse: bool, exact: bool, lossy_is_reusable: bool
) -> None:
    use = DecodeUse(Coding(accept_quantised=accept, reuse_quantised=reuse))
    assert use.exact is exact
    assert use.keeps(lossy=False)
    assert use.is_reusable
    assert use.keeps(lossy=True) is use.is_reusable is lossy_is_reusable


def test_what_is_lent_ends_when_it_is_given_back_and_not_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket, reservations = await landed(prefill, decode), DecodePages(decode.incoming)
            reserved = reservations.find(ticket.transfer_id)
            reservations.lend(reserved)
            reservations.give_up(reserved, "request_ended")
            decode.incoming.abort(ticket.transfer_id, "request_ended")
            assert decode.incoming.expire() == []
            with pytest.raises(NodeRefusal, match="claimed_twice: the reservation is loading"):
                reservations.lend(reserved)
            assert decode.pages.report().reservations == 1
            reservations.give_back(reserved, "loaded")
            assert decode.pages.report().reservations == 0
            assert decode.incoming.counts.ended == {"loaded": 1}

    run(scenario())


def test_no_engine_loads_a_prefix(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            ticket = decode.reserve(TOKENS, 48, prefix_only=True)
            with pytest.raises(NodeRefusal, match="unknown_transfer"):
                DecodePages(decode.incoming).find(ticket.transfer_id)
            assert not decode.landings.expects_decodes
            decode.incoming.abort(ticket.transfer_id, "aborted")

    run(scenario())


def test_a_request_is_booked_until_an_engine_begins_with_it_or_nobody_can(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            reservations, holders = DecodePages(decode.incoming), decode.holders
            begun = await landed(prefill, decode, holder="one")
            assert holders.booked_by("one") == 1
            reserved = reservations.find(begun.transfer_id)
            for _ in range(2):  # an engine that claims again has had it already
                with reservations.claimed(reserved):
                    assert holders.booked_by("one") == 0
            reservations.lend(reserved)
            reservations.give_back(reserved, "loaded")
            lost = decode.reserve(TOKENS, holder="one")
            prefix = decode.reserve(TOKENS[:16], 16, prefix_only=True, holder="one")  # no request
            assert (holders.booked_by("one"), holders.booked_by_others("two")) == (1, 1)
            for ticket in (lost, prefix):
                decode.incoming.abort(ticket.transfer_id, "request_ended")
                assert (holders.booked_by("one"), holders.booked_by_others("two")) == (0, 0)

    run(scenario())
