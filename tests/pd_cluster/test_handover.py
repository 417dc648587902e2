"""KVCache from one node to another, through real links, with the engines played by hand."""

from pathlib import Path

import pytest

from hybrid_cache.hashing.block_hash import block_hashes
from node.errors import NodeRefusal
from tests.pd_cluster.handover import BLOCK, TOKENS, HandNode, hand_over, run, turns_of_the_loop, two_nodes, until
from transport.control import messages as m


@pytest.mark.parametrize("use_shm", [False, True], ids=["tcp", "shm"])
@pytest.mark.parametrize("num_tokens", [2, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 1, 50])
def test_every_length_arrives_bit_by_bit(tmp_path: Path, use_shm: bool, num_tokens: int) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path, use_shm=use_shm) as (prefill, decode):
            _, delivered = await hand_over(prefill, decode, TOKENS[:num_tokens])
            assert delivered.link == ("shm" if use_shm else "tcp")

    run(scenario())


def test_prefixes_on_both_sides_are_reused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            first, full = await hand_over(prefill, decode, TOKENS[:34])
            assert first.cached_tokens == 0
            second, rest = await hand_over(prefill, decode, TOKENS)
            assert second.cached_tokens == 32
            assert 0 < rest.bytes_total < full.bytes_total + 4 * 2 * 24 * BLOCK
            # The decode side keeps its own full-attention prefix even when the prefill node has none of it.
            third = HandNode("p2", tmp_path)
            try:
                pages, again = await hand_over(third, decode, [*TOKENS, 7, 8, 9])
                assert pages.cached_tokens == 0
                assert again.bytes_total < rest.bytes_total + 2 * 24 * BLOCK
            finally:
                await third.close()

    run(scenario())


def test_a_prompt_that_is_cached_whole_needs_no_compute(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            await hand_over(prefill, decode, TOKENS[: 2 * BLOCK + 1])
            pages, _ = await hand_over(prefill, decode, TOKENS[: 2 * BLOCK + 1])
            assert pages.cached_tokens == pages.num_tokens == 2 * BLOCK

    run(scenario())


def test_another_node_finishes_what_a_dead_one_began(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            prefill.begin("job", TOKENS, len(TOKENS) - 1, ticket)
            pages = await prefill.heard()
            assert isinstance(pages, m.JobPages)
            prefill.compute(pages, TOKENS, upto=40)
            landing = decode.incoming.entries[ticket.transfer_id].landing
            await until(lambda: landing and landing.bytes_landed >= 5 * 2 * 24 * BLOCK)
            early = landing.bytes_landed if landing else 0
            prefill.loans.engine_gone(prefill)
            second = HandNode("p2", tmp_path)
            try:
                second.begin("job", TOKENS, len(TOKENS) - 1, ticket)
                pages = await second.heard()
                assert isinstance(pages, m.JobPages)
                second.compute(pages, TOKENS)
                delivered = await second.heard()
                assert isinstance(delivered, m.Delivered)
                assert delivered.ok
                landed = await decode.claim(ticket, TOKENS)
                assert isinstance(landed, m.JobPages)
                decode.check(landed, TOKENS)
                assert delivered.bytes_total + early == landing.bytes_total
                second.end("job")
                decode.end("claim", loaded=True)
            finally:
                await second.close()

    run(scenario())


def test_an_aborted_reservation_frees_both_sides(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            prefill.begin("job", TOKENS, len(TOKENS) - 1, ticket)
            pages = await prefill.heard()
            assert isinstance(pages, m.JobPages)
            prefill.compute(pages, TOKENS, upto=24)
            assert decode.incoming.abort(ticket.transfer_id, "request_ended")
            delivered = await prefill.heard()
            assert isinstance(delivered, m.Delivered)
            assert (delivered.ok, delivered.reason) == (False, "cancelled")
            prefill.end("job")
            decode.incoming.abort(ticket.transfer_id, "again")
            assert decode.incoming.counts.ended == {"request_ended": 1}
            decode.incoming.abort(decode.reserve(TOKENS).transfer_id, "a word of one's own")
            assert decode.incoming.counts.ended == {"request_ended": 1, "other": 1}

    run(scenario())


def test_an_aborted_push_is_told_to_its_engine_and_leaves_the_reservation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            prefill.begin("job", TOKENS, len(TOKENS) - 1, ticket)
            assert isinstance(await prefill.heard(), m.JobPages)
            assert not prefill.legs.abort("another", "client_gone")
            assert prefill.legs.abort(ticket.transfer_id, "client_gone")
            delivered = await prefill.heard()
            assert isinstance(delivered, m.Delivered)
            assert (delivered.ok, delivered.reason) == (False, "aborted")
            prefill.end("job")
            assert decode.incoming.landing == 1
            decode.incoming.abort(ticket.transfer_id, "client_gone")

    run(scenario())


def test_a_reservation_nobody_fills_ends_with_its_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (_, decode):
            ticket = decode.reserve(TOKENS, ttl_s=0.05)
            await until(lambda: decode.incoming.expire() == [ticket.transfer_id])
            refused = await decode.claim(ticket, TOKENS)
            assert isinstance(refused, m.Refused)

    run(scenario())


def test_other_tokens_than_reserved_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (prefill, decode):
            ticket = decode.reserve(TOKENS)
            other = [*TOKENS[:-1], 1]
            prefill.begin("job", other, len(other) - 1, ticket)
            refused = await prefill.heard()
            assert isinstance(refused, m.Refused)
            assert refused.reason == "digest_mismatch"
            refused = await decode.claim(ticket, other)
            assert isinstance(refused, m.Refused)
            assert refused.reason == "digest_mismatch"

    run(scenario())


def test_a_cached_prefix_moves_between_nodes_without_an_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_nodes(tmp_path) as (source, target):
            source.begin("job", TOKENS, 48)
            pages = await source.heard()
            assert isinstance(pages, m.JobPages)
            source.compute(pages, TOKENS)
            source.end("job")
            hashes = block_hashes(TOKENS[:48], BLOCK, b"")
            ticket = target.reserve(TOKENS, 48, prefix_only=True)
            tokens, size = await source.legs.push_prefix(hashes, ticket)
            await target.incoming.commit(ticket.transfer_id, 30.0)
            assert (tokens, size > 0) == (48, True)
            assert target.pages.match(hashes, 60).num_tokens == 48
            with pytest.raises(NodeRefusal, match="not_cached"):
                await source.legs.push_prefix(block_hashes(range(48), BLOCK, b""), ticket)

    run(scenario())


def test_a_full_pool_waits_for_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = HandNode("p", tmp_path)
        try:
            held = await fill(node)
            node.begin("late", [5000] * 2000, 1999)
            await turns_of_the_loop()
            assert node.inbox.empty(), "it must wait"
            node.end(held.pop())
            assert isinstance(await node.heard(), m.JobPages)
            for job in [*held, "late"]:
                node.end(job)
        finally:
            await node.close()

    run(scenario())


async def fill(node: HandNode) -> list[str]:
    """Jobs of 2000 tokens until no other one finds room."""
    held: list[str] = []
    needed = 0
    while not held or node.pages.report().pages_free >= needed:
        before = node.pages.report().pages_free
        held.append(f"job{len(held)}")
        node.begin(held[-1], [len(held)] * 2000, 1999)
        assert isinstance(await node.heard(), m.JobPages)
        needed = before - node.pages.report().pages_free
    return held


def test_who_waits_too_long_for_room_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        node = HandNode("p", tmp_path, room_timeout_s=0.05)
        try:
            held = await fill(node)
            node.begin("late", [5000] * 2000, 1999)
            answer = await node.heard()
            assert isinstance(answer, m.Refused)
            assert answer.reason == "no_capacity"
            for job in held:
                node.end(job)
        finally:
            await node.close()

    run(scenario())
