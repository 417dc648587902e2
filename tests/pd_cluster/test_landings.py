"""Landed KVCache and the engines that claim it: whatever they do, nothing stays held."""

import asyncio
from pathlib import Path

import pytest

from tests.pd_cluster.handover import TOKENS, landed, lent, run, two_nodes, until
from transport.control import messages as m


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("gone", [False, True], ids=["EndJob", "engine dies"])
def test_a_claim_given_up_in_the_moment_of_landing_holds_nothing(tmp_path: Path, turns: int, gone: bool) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            claim = asyncio.create_task(decode.claim(ticket, TOKENS))
            await until(lambda: decode.landings.waiting)
            prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
            await decode.incoming.entries[ticket.transfer_id].landed
            for _ in range(turns):
                await asyncio.sleep(0)
            if gone:
                decode.landings.engine_gone(decode)
            else:
                decode.end("claim")
            prefill.end("job")
            await until(lambda: not decode.landings.waiting)
            claim.cancel()
            # Either the claim came first and its end freed it, or it is there for the next one.
            entry = decode.incoming.entries.get(ticket.transfer_id)
            assert entry is None or (entry.state.value == "landed" and not entry.use.is_lent)
            decode.incoming.abort(ticket.transfer_id, "")

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
                decode.landings.claim(second, decode, decode.inbox.put_nowait)
                refused = await decode.heard()
                assert isinstance(refused, m.Refused)
                assert refused.reason == reason
            decode.end("second")
            assert decode.incoming.abort(ticket.transfer_id, "client_gone")
            await decode.incoming.commit(ticket.transfer_id, 1.0)
            assert decode.pages.report().reservations == 1
            decode.check(pages, TOKENS)
            decode.end("claim", loaded=True)

    run(scenario())


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0, 0.0])
def test_odd_timeouts_are_answered(tmp_path: Path, timeout_s: float) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            refused = await decode.claim(decode.reserve(TOKENS), TOKENS, timeout_s)
            assert isinstance(refused, m.Refused)
            assert refused.reason == "landing_timeout"

    run(scenario())


def test_a_landing_waits_for_the_next_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            waiting = asyncio.create_task(decode.claim(ticket, TOKENS))
            await until(lambda: decode.landings.waiting)
            decode.landings.engine_gone(decode)
            prefill.compute(await lent(prefill, "job", TOKENS, ticket), TOKENS)
            await decode.incoming.entries[ticket.transfer_id].landed
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
            await until(lambda: decode.landings.waiting)
            await until(decode.incoming.expire)
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
