"""Reservations in unlucky moments: pages go back once, and never while an engine reads them."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path

import pytest

from node.errors import NodeRefusal
from tests.node.handover import HandNode, two_nodes, until
from tests.node.test_producer import lent
from transport import messages as m
from transport.proto import node_pb2 as pb

TOKENS = list(range(100, 161))


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 90.0))


async def landed(prefill: HandNode, decode: HandNode) -> m.TicketInfo:
    """A reservation that is complete."""
    ticket = decode.reserve(TOKENS)
    prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
    delivered = await prefill.heard()
    assert isinstance(delivered, m.Delivered)
    assert delivered.ok
    prefill.end("job")
    await decode.consumer._incoming[ticket.transfer_id].landed
    return ticket


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("gone", [False, True], ids=["EndJob", "engine dies"])
def test_a_claim_given_up_in_the_moment_of_landing_holds_nothing(tmp_path: Path, turns: int, gone: bool) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            claim = asyncio.create_task(decode.claim(ticket, TOKENS))
            await asyncio.sleep(0.01)
            prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
            await decode.consumer._incoming[ticket.transfer_id].landed
            for _ in range(turns):
                await asyncio.sleep(0)
            if gone:
                decode.consumer.engine_gone(decode)
            else:
                decode.end("claim")
            prefill.end("job")
            await asyncio.sleep(0.01)
            claim.cancel()
            # Either the claim came first and its end freed it, or it is there for the next one.
            entry = decode.consumer._incoming.get(ticket.transfer_id)
            assert entry is None or entry.state.value == "landed"
            decode.consumer.abort(ticket.transfer_id, "")

    run(scenario())


def test_a_second_claim_cannot_free_what_an_engine_is_reading(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = await landed(prefill, decode)
            pages = await decode.claim(ticket, TOKENS)
            assert isinstance(pages, m.JobPages)
            for digest, reason in ((b"other", "digest_mismatch"), (ticket.tokens_digest, "claimed_twice")):
                second = m.ClaimLanding(
                    job="second", transfer_id=ticket.transfer_id, tokens_digest=digest, timeout_s=1.0
                )
                decode.consumer.claim(second, decode, decode.inbox.put_nowait)
                refused = await decode.heard()
                assert isinstance(refused, m.Refused)
                assert refused.reason == reason
            decode.end("second")
            assert decode.consumer.abort(ticket.transfer_id, "client_gone")
            await decode.consumer.commit(ticket.transfer_id, 1.0)
            assert decode.pages.report().reservations == 1
            decode.check(pages, TOKENS)
            decode.end("claim", loaded=True)

    run(scenario())


def test_commit_knows_what_was_committed_and_what_never_arrived(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = await landed(prefill, decode)
            for _ in range(2):
                await decode.consumer.commit(ticket.transfer_id, 1.0)
            aborted = decode.reserve(TOKENS)
            decode.consumer.abort(aborted.transfer_id, "client_gone")
            for transfer_id in (aborted.transfer_id, "never heard of"):
                with pytest.raises(NodeRefusal):
                    await decode.consumer.commit(transfer_id, 1.0)

    run(scenario())


def test_an_abort_that_meets_the_last_byte_frees_the_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            landing = decode.consumer._incoming[ticket.transfer_id].landing
            assert landing is not None
            prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
            while landing.bytes_landed < landing._landing.bytes_total:
                pass  # keeps the loop from hearing of it: the landing is complete, its owner does not know yet
            assert decode.consumer.abort(ticket.transfer_id, "client_gone")
            prefill.end("job")

    run(scenario())


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0, 0.0])
def test_odd_timeouts_are_answered(tmp_path: Path, timeout_s: float) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            refused = await decode.claim(decode.reserve(TOKENS), TOKENS, timeout_s)
            assert isinstance(refused, m.Refused)
            assert refused.reason == "landing_timeout"

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
                decode.consumer.reserve(request_)
            assert caught.value.label == reason
            assert decode.consumer.counts.refused == {reason: 1}

    run(scenario())


def test_a_reservation_that_cannot_be_expected_holds_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            await asyncio.to_thread(decode.links.close)
            with pytest.raises(NodeRefusal):
                decode.reserve(TOKENS)

    run(scenario())


def test_a_landing_waits_for_the_next_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            waiting = asyncio.create_task(decode.claim(ticket, TOKENS))
            await asyncio.sleep(0.01)
            decode.consumer.engine_gone(decode)
            prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
            await decode.consumer._incoming[ticket.transfer_id].landed
            assert not waiting.done()
            waiting.cancel()
            pages = await decode.claim(ticket, TOKENS)
            assert isinstance(pages, m.JobPages)
            decode.check(pages, TOKENS)
            decode.end("claim", loaded=True)
            prefill.end("job")

    run(scenario())


def test_a_claim_hears_that_the_lease_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            ticket = decode.reserve(TOKENS, ttl_s=0.02)
            waiting = asyncio.create_task(decode.claim(ticket, TOKENS))
            await until(lambda: len(decode.consumer._claims))
            await until(decode.consumer.expire)
            refused = await waiting
            assert isinstance(refused, m.Refused)
            assert refused.reason == "lease_expired"

    run(scenario())


def test_a_job_name_that_has_claimed_is_a_broken_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = await landed(prefill, decode)
            assert isinstance(await decode.claim(ticket, TOKENS), m.JobPages)
            with pytest.raises(m.MessageError, match="claim"):
                await decode.claim(ticket, TOKENS)
            decode.end("claim", loaded=True)

    run(scenario())
