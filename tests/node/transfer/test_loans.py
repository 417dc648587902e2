"""Prefill jobs that go wrong: whatever happens, the engine gets an answer and no page stays behind."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from hybrid_cache.hashing.block_hash import block_hashes
from node.errors import NodeRefusal
from node.kvcache.pages import ArenaPages
from tests.node.handover import BLOCK, HandNode, run, turns_of_the_loop, two_nodes, until
from transport.control import messages as m

TOKENS = list(range(100, 161))
LAST = len(TOKENS) - 1


async def refusal(node: HandNode) -> str:
    answer = await node.heard()
    assert isinstance(answer, m.Refused), answer
    return answer.reason


async def lent(node: HandNode, job: str, tokens: list[int], ticket: m.TicketInfo | None = None) -> m.JobPages:
    node.begin(job, tokens, len(tokens) - 1, ticket)
    pages = await node.heard()
    assert isinstance(pages, m.JobPages), pages
    return pages


async def cache(node: HandNode, tokens: list[int]) -> list[bytes]:
    """Makes a prefix of whole blocks cached; returns its hashes."""
    node.begin("warm", tokens, len(tokens))
    pages = await node.heard()
    assert isinstance(pages, m.JobPages)
    node.compute(pages, tokens)
    node.end("warm")
    return block_hashes(tokens, BLOCK, b"")


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
            assert prefill.producer.is_idle()
            assert prefill.producer.counts.refused == {reason: 1}
            decode.consumer.abort(ticket.transfer_id, "")

    run(scenario())


@pytest.mark.parametrize("num_tokens", [0, -1, 1 << 60])
def test_lengths_that_cannot_be_are_refused(tmp_path: Path, num_tokens: int) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            message = m.BeginPrefill(job="j", request_id="r", hashes=b"", num_tokens=num_tokens, tokens_digest=b"")
            prefill.producer.begin(message, prefill, prefill.inbox.put_nowait)
            assert await refusal(prefill) == "bad_request"

    run(scenario())


def test_hashes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            for hashes in (b"short", bytes(64)):
                message = m.BeginPrefill(job="j", request_id="r", hashes=hashes, num_tokens=20, tokens_digest=b"")
                prefill.producer.begin(message, prefill, prefill.inbox.put_nowait)
                assert await refusal(prefill) == "bad_request"

    run(scenario())


def test_a_push_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            await asyncio.to_thread(prefill.links.close)
            prefill.begin("job", TOKENS, LAST, ticket)
            assert await refusal(prefill) == "push_failed"
            decode.consumer.abort(ticket.transfer_id, "")

    run(scenario())


def test_a_job_name_in_use_is_a_broken_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            await lent(prefill, "job", TOKENS)
            with pytest.raises(m.MessageError, match="job"):
                prefill.begin("job", TOKENS, LAST)
            prefill.end("job")
            await lent(prefill, "job", TOKENS)
            prefill.end("job")

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
                decode.consumer.abort(ticket.transfer_id, "")

    run(scenario())


@pytest.mark.parametrize("turns", range(4))
def test_a_job_that_ends_in_the_moment_it_could_begin_holds_nothing(tmp_path: Path, turns: int) -> None:
    """Pages become free and the engine gives the waiting job up, a few turns of the loop later."""

    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            await lent(prefill, "big", list(range(13_000)))
            prefill.begin("late", list(range(20_000, 33_000)), 12_999)
            await turns_of_the_loop()
            assert prefill.inbox.empty(), "it must wait"
            prefill.end("big")
            await turns_of_the_loop(turns)
            prefill.end("late")
            await until(prefill.producer.is_idle)

    run(scenario())


async def begun(node: HandNode, number: int, tenant: str) -> m.JobPages | None:
    """Pages for a job of 400 tokens of its own; None: it waits for them."""
    node.begin(f"{tenant}{number}", list(range(400 * number, 400 * number + 400)), 399, tenant=tenant)
    await turns_of_the_loop(4)
    return node.inbox.get_nowait() if not node.inbox.empty() else None  # type: ignore[return-value]


async def fill(node: HandNode, tenant: str) -> int:
    """Jobs of a tenant, of which the last one waits."""
    number = 1
    while await begun(node, number, tenant) is not None:
        number += 1
    return number


async def end_until_heard(node: HandNode, jobs: Iterable[str]) -> m.JobPages:
    """Ends one job after the other until somebody has their pages."""
    for job in jobs:
        node.end(job)
        await turns_of_the_loop(4)
        if not node.inbox.empty():
            break
    pages = await node.heard()
    assert isinstance(pages, m.JobPages)
    return pages


def test_a_tenant_alone_has_all_pages_and_beside_another_leaves_it_an_eighth(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            alone = await fill(prefill, "heavy")
            assert await begun(decode, 1000, "light") is not None
            decode.end("light1000")
            beside = await fill(decode, "heavy")
            assert beside == pytest.approx(alone * 7 / 8, abs=1.5)
            assert await begun(decode, 1001, "light") is not None
            for node in (prefill, decode):
                node.producer.engine_gone(node)

    run(scenario())


def test_pages_that_become_free_go_to_the_tenant_that_holds_least(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            waiting = await fill(prefill, "heavy")
            assert await begun(prefill, waiting + 1, "heavy") is None
            assert await begun(prefill, 1000, "light") is None
            ends = (f"heavy{number}" for number in range(1, waiting))
            assert (await end_until_heard(prefill, ends)).job == "light1000"
            assert (await end_until_heard(prefill, ends)).job == f"heavy{waiting}"
            prefill.producer.engine_gone(prefill)

    run(scenario())


def test_a_tenant_that_gives_up_waiting_keeps_nobody_from_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            waiting = await fill(prefill, "heavy")
            prefill.begin("large", list(range(1_000_000, 1_010_000)), 9_999, tenant="light")
            for number in range(1, waiting // 4):
                prefill.end(f"heavy{number}")
                await turns_of_the_loop(4)
            assert prefill.inbox.empty(), "the large one comes first"
            prefill.end("large")
            pages = await prefill.heard()
            assert isinstance(pages, m.JobPages)
            assert pages.job == f"heavy{waiting}"
            prefill.producer.engine_gone(prefill)
            prefill.producer.engine_gone(prefill)

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
                prefill.producer.layer_done(m.LayerDone(job="job", group=group, layer=layer, num_tokens=8), prefill)
            with pytest.raises(m.MessageError):
                prefill.producer.state_done(m.StateDone(job="job", group=0, layer=2, num_tokens=1), prefill)
            prefill.producer.layer_done(m.LayerDone(job="job", group=0, layer=2, num_tokens=1 << 60), prefill)
            prefill.end("job")
            decode.consumer.abort(ticket.transfer_id, "")

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
                await source.producer.push_prefix(hashes, msgspec.structs.replace(ticket, **change))
            assert caught.value.label == reason
            target.consumer.abort(ticket.transfer_id, "")

    run(scenario())


def test_a_prefix_push_that_is_given_up_frees_its_pages_when_the_lanes_let_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (source, target):
            hashes = await cache(source, TOKENS[:48])
            ticket = target.reserve(TOKENS, 48, prefix_only=True)
            await asyncio.to_thread(target.links.close)  # nobody answers: it would wait for seconds
            push = asyncio.create_task(source.producer.push_prefix(hashes, ticket))
            await until(lambda: source.producer.sending == 1)
            assert not source.producer.is_idle()
            push.cancel()
            with pytest.raises(asyncio.CancelledError):
                await push
            await until(source.producer.is_idle)
            assert source.pages.report().pages_locked == 0

    run(scenario())


def test_what_the_engine_says_it_computed_is_what_counts(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []

    class NotingPages(ArenaPages):
        def computed(self, num_tokens: int, seconds: float) -> None:
            told.append((num_tokens, seconds))

    async def scenario() -> None:
        async with two_nodes(tmp_path, pages=NotingPages) as (prefill, _):
            counts = prefill.producer.counts
            for said in ({}, {"computed_tokens": 20, "compute_s": 2.0}, {"computed_tokens": 0, "compute_s": 0.5}):
                pages = await lent(prefill, "job", [*TOKENS, len(told)])
                prefill.producer.prefill_done(m.PrefillDone(job="job", num_tokens=pages.num_tokens, **said), prefill)
                prefill.end("job")
            assert told[0][0] == LAST + 1
            assert told[1:] == [(20, 2.0)]
            assert (counts.prefilled_tokens, counts.cached_tokens) == (LAST + 21, 2 * (LAST + 1) - 20)

    run(scenario())


@pytest.mark.parametrize(
    "said", [{"computed_tokens": LAST + 1}, {"computed_tokens": -1}, {"compute_s": -1.0}, {"compute_s": float("nan")}]
)
def test_computing_that_cannot_be_is_a_broken_engine(tmp_path: Path, said: dict[str, float]) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            await lent(prefill, "job", TOKENS)
            with pytest.raises(m.MessageError, match="computed"):
                prefill.producer.prefill_done(m.PrefillDone(job="job", num_tokens=LAST, **said), prefill)
            prefill.end("job")

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
            prefill.producer.end(m.EndJob(job="aborted", reason="aborted"), prefill)
            await lent(prefill, "died", TOKENS)
            prefill.producer.engine_gone(prefill)
            prefill.begin("refused", TOKENS, LAST, msgspec.structs.replace(ticket, num_tokens=LAST - 1))
            assert await refusal(prefill) == "digest_mismatch"
            assert prefill.producer.counts.jobs == {
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
            prefill.producer.abort(ticket.transfer_id, "request_ended")
            failed = await prefill.heard()
            assert isinstance(failed, m.Delivered)
            prefill.producer.end(m.EndJob(job="leg", reason="aborted"), prefill)
            assert prefill.producer.counts.jobs == {("leg", failed.reason): 1}
            decode.consumer.abort(ticket.transfer_id, "")

    run(scenario())


def test_an_answer_is_taken_without_waiting_and_counts_as_no_prefill(tmp_path: Path) -> None:
    """What a decode node computed token by token: attention that is cached is shared, the state is only the last one."""

    async def scenario() -> None:
        async with two_nodes(tmp_path) as (node, _):
            prompt, talk = TOKENS[: 2 * BLOCK], TOKENS[: 3 * BLOCK]
            await cache(node, prompt)
            before = node.producer.counts.prefilled_tokens, node.producer.counts.cached_tokens
            node.producer.begin(answer_of(talk), node, node.inbox.put_nowait)
            pages = await node.heard()
            assert isinstance(pages, m.JobPages)
            assert (pages.num_tokens, pages.cached_tokens) == (3 * BLOCK, 2 * BLOCK)
            assert [tuple(lengths) for lengths in pages.states if lengths] == [(3 * BLOCK,)]
            node.producer.prefill_done(
                m.PrefillDone(job="answer", num_tokens=3 * BLOCK, computed_tokens=0, compute_s=0.0), node
            )
            node.producer.end(m.EndJob(job="answer"), node)
            assert (node.producer.counts.prefilled_tokens, node.producer.counts.cached_tokens) == before
            assert node.producer.counts.jobs["answer", "ok"] == 1
            assert (await lent(node, "next", [*talk, 7, 8])).cached_tokens == 3 * BLOCK
            node.end("next")

    run(scenario())


def test_an_answer_gets_no_room_that_others_hold(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (node, _):
            blocks = 1
            while True:  # a prompt holds all there is
                message = m.BeginPrefill(
                    job=f"hog{blocks}", request_id="r", hashes=b"", num_tokens=BLOCK, tokens_digest=b"", computed=True
                )
                node.producer.begin(message, node, node.inbox.put_nowait)
                if isinstance(answer := await node.heard(), m.Refused):
                    break
                blocks += 1
            assert answer.reason == "no_capacity"
            for number in range(1, blocks):
                node.producer.end(m.EndJob(job=f"hog{number}"), node)

    run(scenario())


def answer_of(talk: list[int]) -> m.BeginPrefill:
    hashes = b"".join(block_hashes(talk, BLOCK, b""))
    return m.BeginPrefill(
        job="answer", request_id="r", hashes=hashes, num_tokens=len(talk), tokens_digest=b"", computed=True
    )


def test_a_look_up_lends_what_is_cached_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (node, _):
            hashes = await cache(node, TOKENS[: 4 * BLOCK])
            for job, asked, found in (
                ("same", hashes, 4),
                ("longer", [*hashes, b"x" * 32], 4),
                ("other", [b"y" * 32], 0),
            ):
                before = node.pages.report()
                message = m.BeginPrefill(
                    job=job,
                    request_id=job,
                    hashes=b"".join(asked),
                    num_tokens=len(asked) * BLOCK,
                    tokens_digest=b"",
                    cached_only=True,
                )
                node.producer.begin(message, node, node.inbox.put_nowait)
                pages = await node.heard()
                assert isinstance(pages, m.JobPages), pages
                assert (pages.num_tokens, pages.cached_tokens) == (found * BLOCK, found * BLOCK)
                assert node.pages.report().pages_free == before.pages_free
                if found:
                    node.check(pages, TOKENS)
                node.end(job)
            assert node.producer.counts.jobs["lookup", "ok"] == 2

    run(scenario())


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_look_up_of_no_tokens_is_refused(tmp_path: Path, num_tokens: int) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (node, _):
            message = m.BeginPrefill(
                job="j", request_id="r", hashes=b"", num_tokens=num_tokens, tokens_digest=b"", cached_only=True
            )
            node.producer.begin(message, node, node.inbox.put_nowait)
            assert await refusal(node) == "bad_request"

    run(scenario())
