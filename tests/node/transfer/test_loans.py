"""Loans that go wrong: whatever happens, the engine gets an answer and no page stays behind."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from hybrid_cache.hashing.block_hash import block_hashes
from node.kvcache.pages import ArenaPages
from tests.pd_cluster.handover import (
    BLOCK,
    TOKENS,
    HandNode,
    cache,
    lent,
    refusal,
    run,
    turns_of_the_loop,
    two_nodes,
    until,
)
from transport.control import messages as m

LAST = len(TOKENS) - 1


@pytest.mark.parametrize("num_tokens", [0, -1, 1 << 60])
def test_lengths_that_cannot_be_are_refused(tmp_path: Path, num_tokens: int) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            message = m.BeginPrefill(job="j", request_id="r", hashes=b"", num_tokens=num_tokens, tokens_digest=b"")
            prefill.loans.begin(message, prefill, prefill.inbox.put_nowait)
            assert await refusal(prefill) == "bad_request"

    run(scenario())


def test_hashes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, _):
            for hashes in (b"short", bytes(64)):
                message = m.BeginPrefill(job="j", request_id="r", hashes=hashes, num_tokens=20, tokens_digest=b"")
                prefill.loans.begin(message, prefill, prefill.inbox.put_nowait)
                assert await refusal(prefill) == "bad_request"

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
            await until(prefill.sends_nothing)

    run(scenario())


async def begun(node: HandNode, number: int, tenant: str) -> m.JobPages | None:
    """Pages for a job of 400 tokens of its own; None: it waits for them."""
    node.begin(f"{tenant}{number}", list(range(400 * number, 400 * number + 400)), 399, tenant=tenant)
    await turns_of_the_loop(4)
    return node.inbox.get_nowait() if not node.inbox.empty() else None  # type: ignore[return-value]


async def fill(node: HandNode, tenant: str) -> int:
    """Jobs of a tenant; the last one waits."""
    number = 1
    while await begun(node, number, tenant) is not None:
        number += 1
    return number


async def end_until_heard(node: HandNode, jobs: Iterable[str]) -> m.JobPages:
    """Ends one job after the other until another job has their pages."""
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
                node.loans.engine_gone(node)

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
            prefill.loans.engine_gone(prefill)

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
            prefill.loans.engine_gone(prefill)
            prefill.loans.engine_gone(prefill)

    run(scenario())


def test_what_the_engine_says_it_computed_is_what_counts(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []

    class NotingPages(ArenaPages):
        def computed(self, num_tokens: int, seconds: float) -> None:
            told.append((num_tokens, seconds))

    async def scenario() -> None:
        async with two_nodes(tmp_path, pages=NotingPages) as (prefill, _):
            counts = prefill.loans.counts
            for said in ({}, {"computed_tokens": 20, "compute_s": 2.0}, {"computed_tokens": 0, "compute_s": 0.5}):
                pages = await lent(prefill, "job", [*TOKENS, len(told)])
                prefill.loans.prefill_done(m.PrefillDone(job="job", num_tokens=pages.num_tokens, **said), prefill)
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
                prefill.loans.prefill_done(m.PrefillDone(job="job", num_tokens=LAST, **said), prefill)
            prefill.end("job")

    run(scenario())


def test_an_answer_is_taken_without_waiting_and_counts_as_no_prefill(tmp_path: Path) -> None:
    """What a decode node computed token by token: attention that is cached is shared, the state is only the last one."""

    async def scenario() -> None:
        async with two_nodes(tmp_path) as (node, _):
            prompt, talk = TOKENS[: 2 * BLOCK], TOKENS[: 3 * BLOCK]
            await cache(node, prompt)
            before = node.loans.counts.prefilled_tokens, node.loans.counts.cached_tokens
            node.loans.begin(answer_of(talk), node, node.inbox.put_nowait)
            pages = await node.heard()
            assert isinstance(pages, m.JobPages)
            assert (pages.num_tokens, pages.cached_tokens) == (3 * BLOCK, 2 * BLOCK)
            assert [tuple(lengths) for lengths in pages.states if lengths] == [(3 * BLOCK,)]
            node.loans.prefill_done(
                m.PrefillDone(job="answer", num_tokens=3 * BLOCK, computed_tokens=0, compute_s=0.0), node
            )
            node.loans.end(m.EndJob(job="answer"), node)
            assert (node.loans.counts.prefilled_tokens, node.loans.counts.cached_tokens) == before
            assert node.loans.counts.jobs["answer", "ok"] == 1
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
                node.loans.begin(message, node, node.inbox.put_nowait)
                if isinstance(answer := await node.heard(), m.Refused):
                    break
                blocks += 1
            assert answer.reason == "no_capacity"
            for number in range(1, blocks):
                node.loans.end(m.EndJob(job=f"hog{number}"), node)

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
                node.loans.begin(message, node, node.inbox.put_nowait)
                pages = await node.heard()
                assert isinstance(pages, m.JobPages), pages
                assert (pages.num_tokens, pages.cached_tokens) == (found * BLOCK, found * BLOCK)
                assert node.pages.report().pages_free == before.pages_free
                if found:
                    node.check(pages, TOKENS)
                node.end(job)
            assert node.loans.counts.jobs["lookup", "ok"] == 2

    run(scenario())


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_look_up_of_no_tokens_is_refused(tmp_path: Path, num_tokens: int) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (node, _):
            message = m.BeginPrefill(
                job="j", request_id="r", hashes=b"", num_tokens=num_tokens, tokens_digest=b"", cached_only=True
            )
            node.loans.begin(message, node, node.inbox.put_nowait)
            assert await refusal(node) == "bad_request"

    run(scenario())
