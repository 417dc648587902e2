"""Prefills for other nodes that go wrong: the engine hears of it, and no page stays behind."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from node.errors import NodeRefusal
from tests.pd_cluster.handover import TOKENS, cache, lent, refusal, run, two_nodes, until
from transport.control import messages as m

LAST = len(TOKENS) - 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"endpoints": ()}, "no_route"),
        ({"endpoints": (("shm", "127.0.0.1:1", "another host"),)}, "no_route"),
        ({"have_tokens": LAST + 1}, "bad_request"),
        ({"have_tokens": -1}, "bad_request"),
        ({"layout_fingerprint": "other"}, "layout_mismatch"),
        ({"num_tokens": LAST - 1}, "digest_mismatch"),
    ],
)
def test_a_ticket_that_cannot_be_used_is_refused_and_holds_nothing(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            prefill.begin("job", TOKENS, LAST, msgspec.structs.replace(ticket, **change))
            assert await refusal(prefill) == reason
            assert prefill.sends_nothing()
            assert prefill.loans.counts.refused == {reason: 1}
            decode.incoming.abort(ticket.transfer_id, "")

    run(scenario())


def test_a_push_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            await asyncio.to_thread(prefill.egress.close)
            prefill.begin("job", TOKENS, LAST, ticket)
            assert await refusal(prefill) == "push_failed"
            decode.incoming.abort(ticket.transfer_id, "")

    run(scenario())


def test_a_job_may_be_begun_again_while_its_first_push_lets_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            first, second = decode.reserve(TOKENS), decode.reserve(TOKENS)
            await lent(prefill, "job", TOKENS, first)
            prefill.end("job")
            pages = await lent(prefill, "job", TOKENS, second)
            prefill.compute(pages, TOKENS)
            delivered = await prefill.heard()
            assert isinstance(delivered, m.Delivered)
            assert delivered.ok
            prefill.end("job")
            for ticket in (first, second):
                decode.incoming.abort(ticket.transfer_id, "")

    run(scenario())


@pytest.mark.parametrize(
    ("group", "layer"),
    [(9, 2), (-1, 0), (0, 77), (2, 0)],
    ids=["no group", "negative group", "no layer", "a state group"],
)
def test_layers_that_are_none_are_a_broken_engine(tmp_path: Path, group: int, layer: int) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            await lent(prefill, "job", TOKENS, ticket)
            with pytest.raises(m.MessageError):
                prefill.loans.layer_done(m.LayerDone(job="job", group=group, layer=layer, num_tokens=8), prefill)
            with pytest.raises(m.MessageError):
                prefill.loans.state_done(m.StateDone(job="job", group=0, layer=2, num_tokens=1), prefill)
            prefill.loans.layer_done(m.LayerDone(job="job", group=0, layer=2, num_tokens=1 << 60), prefill)
            prefill.end("job")
            decode.incoming.abort(ticket.transfer_id, "")

    run(scenario())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"endpoints": ()}, "no_route"),
        ({"have_tokens": 49}, "bad_request"),
        ({"num_tokens": 0, "have_tokens": 0}, "bad_request"),
        ({"num_tokens": 47}, "not_cached"),
    ],
)
def test_a_prefix_push_that_cannot_be_is_refused_and_holds_nothing(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (source, target):
            hashes = await cache(source, TOKENS[:48])
            ticket = target.reserve(TOKENS, 48, prefix_only=True)
            with pytest.raises(NodeRefusal) as caught:
                await source.legs.push_prefix(hashes, msgspec.structs.replace(ticket, **change))
            assert caught.value.label == reason
            target.incoming.abort(ticket.transfer_id, "")

    run(scenario())


def test_a_prefix_push_that_is_given_up_frees_its_pages_when_the_lanes_let_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (source, target):
            hashes = await cache(source, TOKENS[:48])
            ticket = target.reserve(TOKENS, 48, prefix_only=True)
            await asyncio.to_thread(target.listener.close)  # no answer comes: it would wait for seconds
            push = asyncio.create_task(source.legs.push_prefix(hashes, ticket))
            await until(lambda: source.legs.sending == 1)
            assert not source.sends_nothing()
            push.cancel()
            with pytest.raises(asyncio.CancelledError):
                await push
            await until(source.sends_nothing)
            assert source.pages.report().pages_locked == 0

    run(scenario())


def test_jobs_are_counted_by_what_came_of_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            prefill.compute(await lent(prefill, "leg", TOKENS, ticket), TOKENS)
            assert isinstance(await prefill.heard(), m.Delivered)
            landed = await decode.claim(ticket, TOKENS)
            assert isinstance(landed, m.JobPages)
            decode.end("claim", loaded=True)
            prefill.end("leg")
            prefill.compute(await lent(prefill, "local", TOKENS), TOKENS)
            prefill.end("local")
            await lent(prefill, "aborted", TOKENS)
            prefill.loans.end(m.EndJob(job="aborted", reason="aborted"), prefill)
            await lent(prefill, "died", TOKENS)
            prefill.loans.engine_gone(prefill)
            prefill.begin("refused", TOKENS, LAST, msgspec.structs.replace(ticket, num_tokens=LAST - 1))
            assert await refusal(prefill) == "digest_mismatch"
            assert prefill.loans.counts.jobs == {
                ("leg", "ok"): 1,
                ("local", "ok"): 1,
                ("local", "aborted"): 1,
                ("local", "engine_gone"): 1,
                ("leg", "digest_mismatch"): 1,
            }
            again = await decode.claim(ticket, TOKENS)
            assert isinstance(again, m.Refused)
            assert decode.landings.jobs == {("landing", "ok"): 1, ("landing", again.reason): 1}
            assert decode.landings.loaded_tokens == LAST

    run(scenario())


def test_a_leg_whose_push_fails_is_counted_by_that(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            await lent(prefill, "leg", TOKENS, ticket)
            prefill.legs.abort(ticket.transfer_id, "request_ended")
            failed = await prefill.heard()
            assert isinstance(failed, m.Delivered)
            prefill.loans.end(m.EndJob(job="leg", reason="aborted"), prefill)
            assert prefill.loans.counts.jobs == {("leg", failed.reason): 1}
            decode.incoming.abort(ticket.transfer_id, "")

    run(scenario())
