"""A hold goes back when an error keeps its owner from hearing of it; and on machines long up."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pd_cluster.handover import TOKENS, HandNode, cache, run, two_nodes, until
from transport.control import messages as m

LAST = len(TOKENS) - 1
UPTIME_S = 60 * 86_400.0


class Unable(Exception):
    """What does not work in these tests."""


def deaf(node: HandNode, kind: type[m.AgentMessage]):
    """A reply that fails for one kind of message, as one that cannot be encoded."""

    def reply(message: m.AgentMessage) -> None:
        if isinstance(message, kind):
            raise Unable(str(message))
        node.inbox.put_nowait(message)

    return reply


def holds_nothing(node: HandNode) -> bool:
    report = node.pages.report()
    return node.sends_nothing() and (report.reservations, report.pages_transfer, report.pages_locked) == (0, 0, 0)


def test_a_node_of_a_machine_that_has_been_up_for_sixty_days(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path, clock=lambda: time.monotonic() + UPTIME_S) as (first, _):
            first.begin("a", TOKENS, LAST)
            answer = await first.heard()
            assert isinstance(answer, m.JobPages), answer
            first.compute(answer, TOKENS)
            first.end("a")
            assert holds_nothing(first)
            ticket = first.reserve(TOKENS)
            assert first.incoming.abort(ticket.transfer_id, "aborted")
            await until(lambda: holds_nothing(first))

    run(scenario())


def test_pages_of_an_answer_that_could_not_be_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (first, second):
            first.begin("a", TOKENS, LAST, reply=deaf(first, m.JobPages))
            refused = await first.heard()
            assert isinstance(refused, m.Refused)
            assert refused.reason == "internal"
            await until(lambda: holds_nothing(first))
            ticket = second.reserve(TOKENS)
            first.begin("leg", TOKENS, LAST, ticket, reply=deaf(first, m.JobPages))
            assert isinstance(await first.heard(), m.Refused)
            await until(lambda: holds_nothing(first))
            second.incoming.abort(ticket.transfer_id, "prefill_failed")  # as its gateway does

    run(scenario())


def test_a_landing_that_its_engine_was_not_told_of(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (first, second):
            ticket = second.reserve(TOKENS)
            first.begin("leg", TOKENS, LAST, ticket)
            pages = await first.heard()
            assert isinstance(pages, m.JobPages)
            first.compute(pages, TOKENS)
            assert isinstance(await first.heard(), m.Delivered)
            second.claim_as("claim", ticket, TOKENS, deaf(second, m.JobPages))
            assert isinstance(await second.heard(), m.Refused)
            await until(lambda: holds_nothing(second))
            assert second.incoming.is_idle()
            first.end("leg")

    run(scenario())


def test_a_reservation_whose_use_could_not_be_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (first, _):
            tokens = TOKENS[: len(TOKENS) // 8 * 8]
            await cache(first, tokens)

            def fails(hashes: Sequence[bytes]) -> None:
                raise Unable

            first.pages.on_found = fails
            with pytest.raises(Unable):
                first.reserve([*tokens, 1, 2])
            assert holds_nothing(first)
            await asyncio.sleep(0)

    run(scenario())
