"""What comes of a picked request when its prefill goes well, and when something fails."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from node.control.holders import MAX_NAME
from node.grpc_service import NodeService
from node.picked.bodies import COMPLETIONS, read_body
from node.picked.engine_calls import EngineCalls
from node.picked.handover import PickedRequest, PickedRequests, tenant_of
from node.picked.legs import PLACE_PATH
from node.picked.peer_calls import PeerCalls
from node.picked.port import FAIRNESS, PREFILLER
from tests.node.picked.nodes import MODEL, RunningPair, StandInPeer, running_pair, tokens_of
from tests.node.running import until
from transport.control.proto import node_pb2 as pb

LEG_S = 6.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    with running_pair(tmp_path_factory.mktemp("picked"), picked_leg_s=LEG_S) as running:
        yield running


@pytest.fixture(autouse=True)
def _from_nothing(nodes: RunningPair) -> Iterator[None]:
    """Counts begin at 0, and nothing is held at the end."""
    for each in (nodes.prefill, nodes.decode):
        counts = each.node.agent.picked
        for counter in (counts.requests, counts.fallbacks, counts.legs):
            counter.clear()
    yield
    nodes.run(nodes.prefill.idle())
    nodes.run(nodes.decode.idle())


def prompt(seed: int, num_tokens: int = 300) -> list[int]:
    """One that no other test has."""
    return [4 + (seed * 7919 + place * 31) % 500 for place in range(num_tokens)]


def place(nodes: RunningPair, **changes: Any) -> dict[str, Any]:
    pages = nodes.decode.node.agent.pages
    assert pages is not None
    return {"place": "west/other", "layout_fingerprint": pages.layout.fingerprint} | changes


def test_kvcache_crosses_and_tokens_are_those_of_a_plain_run(nodes: RunningPair) -> None:
    async def scenario() -> None:
        before = await nodes.decode.bytes_landed()
        plain = await nodes.prefill.complete(prompt(1))
        handed = await nodes.decode.complete(prompt(1), prefiller=nodes.prefill.address)
        assert tokens_of(handed) == tokens_of(plain)
        assert await nodes.decode.bytes_landed() > before
        await nodes.decode.counted(handed_over=1)
        assert nodes.prefill.node.agent.picked.legs == {"delivered": 1}

    nodes.run(scenario())


def test_a_text_is_read_by_the_engine(nodes: RunningPair) -> None:
    async def scenario() -> None:
        text = "of rivers and of mountains " * 20
        plain = await nodes.prefill.complete(text)
        handed = await nodes.decode.complete(text, prefiller=nodes.prefill.address)
        assert tokens_of(handed) == tokens_of(plain)
        await nodes.decode.counted(handed_over=1)

    nodes.run(scenario())


def test_a_long_text_is_handed_over_in_parts(nodes: RunningPair) -> None:
    """The engine has a limit of its own, which its client is told: longer than what an HTTP client sends at once."""

    async def scenario() -> None:
        status, told = await nodes.decode.ask("of rivers " * 150_000, prefiller=nodes.prefill.address)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")

    nodes.run(scenario())


def test_what_the_decode_node_has_is_not_sent_again(nodes: RunningPair) -> None:
    async def scenario() -> None:
        asked = prompt(3, 16 * 16 + 1)
        first = await nodes.decode.complete(asked, prefiller=nodes.prefill.address)
        again = await nodes.decode.complete(asked, prefiller=nodes.prefill.address)
        assert tokens_of(first) == tokens_of(again)
        await nodes.decode.counted(handed_over=1, cached=1)

    nodes.run(scenario())


def test_blocks_of_a_cache_salt_are_its_own(nodes: RunningPair) -> None:
    async def scenario() -> None:
        asked = prompt(4, 16 * 16 + 1)
        await nodes.decode.complete(asked, prefiller=nodes.prefill.address, cache_salt="a")
        await nodes.decode.complete(asked, prefiller=nodes.prefill.address, cache_salt="b")
        await nodes.decode.counted(handed_over=2)
        await nodes.decode.complete(asked, prefiller=nodes.prefill.address, cache_salt="a")
        await nodes.decode.counted(handed_over=2, cached=1)

    nodes.run(scenario())


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "unreachable"),
        ("127.0.0.1", "bad_address"),
        ("user@127.0.0.1:1", "bad_address"),
        ("127.0.0.1:1/path", "bad_address"),
        ("127.0.0.1:123456", "bad_address"),
    ],
)
def test_a_dead_prefill_node_costs_nothing_but_the_prefill(nodes: RunningPair, address: str, reason: str) -> None:
    async def scenario() -> None:
        plain = await nodes.prefill.complete(prompt(5))
        fallen = await nodes.decode.complete(prompt(5), prefiller=address)
        assert tokens_of(fallen) == tokens_of(plain)
        await nodes.decode.counted(fell_back=1)
        assert nodes.decode.node.agent.picked.fallbacks == {reason: 1}

    nodes.run(scenario())


@pytest.mark.parametrize(
    ("said", "leg", "reason"),
    [
        ({"layout_fingerprint": "another"}, {}, "layout_mismatch"),
        ({"place": 7}, {}, "bad_answer"),
        ({}, {"delivered": False, "reason": "no_capacity"}, "prefill_no_capacity"),
        ({}, {"delivered": False, "reason": "odd words; {}"}, "prefill_odd_words____"),
        ({}, {"delivered": False}, "prefill_not_delivered"),
        ({}, {"delivered": "perhaps"}, "prefill_bad_answer"),
        ({}, None, "prefill_timeout"),
    ],
)
def test_a_leg_that_fails_is_computed_here(
    nodes: RunningPair, said: dict[str, Any], leg: dict[str, Any] | None, reason: str
) -> None:
    async def scenario() -> None:
        asked = prompt(6 + len(reason))
        plain = await nodes.prefill.complete(asked)
        async with StandInPeer(place(nodes, **said), leg).listening() as peer:
            fallen = await nodes.decode.complete(asked, prefiller=peer.address)
            assert tokens_of(fallen) == tokens_of(plain)
            await nodes.decode.counted(fell_back=1)
            assert nodes.decode.node.agent.picked.fallbacks == {reason: 1}

            async def has_left() -> bool:
                return peer.left == (leg is None)

            await until(has_left)

    nodes.run(scenario())


def test_a_peer_that_says_delivered_and_sends_nothing_costs_time(nodes: RunningPair) -> None:
    """The engine waits as long as the leg may take, and computes the prompt."""

    async def scenario() -> None:
        plain = await nodes.prefill.complete(prompt(40))
        async with StandInPeer(place(nodes), {"delivered": True}).listening() as peer:
            fallen = await nodes.decode.complete(prompt(40), prefiller=peer.address)
        assert tokens_of(fallen) == tokens_of(plain)
        await nodes.decode.counted(fell_back=1)
        assert nodes.decode.node.agent.picked.fallbacks == {"prefill_not_landed": 1}

    nodes.run(scenario())


def test_what_has_landed_is_used_though_the_answer_to_the_leg_is_lost(nodes: RunningPair) -> None:
    async def scenario() -> None:
        plain = await nodes.decode.complete(prompt(45))
        async with nodes.prefill.node.http.get(f"{nodes.prefill.port.url}{PLACE_PATH}") as told:
            its_place = await told.json()
        lost = StandInPeer(its_place, {"delivered": False, "reason": "lost"}, real=nodes.prefill.port.url)
        async with lost.listening() as peer:
            handed = await nodes.decode.complete(prompt(46), prefiller=peer.address)
        assert tokens_of(handed) == tokens_of(await nodes.prefill.complete(prompt(46)))
        assert tokens_of(handed) != tokens_of(plain)
        await nodes.decode.counted(plain=1, handed_over=1)
        assert not nodes.decode.node.agent.picked.fallbacks

    nodes.run(scenario())


def test_usage_says_what_the_prefill_found_cached_and_nothing_else_of_it_is_told(nodes: RunningPair) -> None:
    async def scenario() -> None:
        asked = prompt(48, 16 * 16 + 1)
        await nodes.prefill.complete(asked)
        handed = await nodes.decode.complete(asked, 1, prefiller=nodes.prefill.address)
        assert handed["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}
        async with StandInPeer(place(nodes), {"delivered": True, "cached_tokens": 9}).listening() as peer:
            fallen = await nodes.decode.complete(prompt(49), prefiller=peer.address)
        assert fallen["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert "kv_transfer_params" not in fallen
        await nodes.decode.counted(handed_over=1, fell_back=1)

    nodes.run(scenario())


def test_a_prompt_that_the_engine_refuses_is_prefilled_nowhere(nodes: RunningPair) -> None:
    """Whether it comes as tokens or as a text."""

    async def scenario() -> None:
        most = (await nodes.decode.node.describe()).max_model_len
        for too_long in (prompt(47, most), "of rivers " * most):
            status, told = await nodes.decode.ask(too_long, prefiller=nodes.prefill.address)
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        await nodes.decode.counted(fell_back=2)
        assert nodes.decode.node.agent.picked.fallbacks == {"too_long": 2}
        assert not nodes.prefill.node.agent.picked.legs

    nodes.run(scenario())


class WrongReader(EngineCalls):
    """Says of a prompt that it is another one."""

    async def tokens(self, path: str, body: bytes) -> list[int]:
        return list(reversed(await super().tokens(path, body)))


def test_a_prompt_that_is_read_otherwise_than_its_engine_reads_it_is_computed(nodes: RunningPair) -> None:
    """What has landed are other tokens' blocks: the engine's digest is another one, and no token comes from them."""

    async def scenario() -> None:
        text = "of rivers and of seas " * 20
        plain = await nodes.prefill.complete(text)
        agent = nodes.decode.node.agent
        engine, peers = WrongReader(lambda: agent.door.engine_url), PeerCalls(agent.config.known_peers(), None)
        picked = PickedRequests(agent, NodeService(agent, time.monotonic), engine, peers)
        body = {"model": MODEL, "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        said = json.dumps(body | {"return_token_ids": True}).encode()
        asked = PickedRequest(id="r", body=read_body(COMPLETIONS, said), prefiller=nodes.prefill.address)
        try:
            async with picked.answered(asked) as answer:
                assert tokens_of(await answer.told.json()) == tokens_of(plain)
        finally:
            await engine.close()
            await peers.close()
        assert agent.picked.fallbacks == {"digest_mismatch": 1}

    nodes.run(scenario())


def test_a_client_that_leaves_takes_its_landing_and_its_leg_with_it(nodes: RunningPair) -> None:
    async def scenario() -> None:
        async with StandInPeer(place(nodes)).listening() as peer:
            asking = asyncio.ensure_future(nodes.decode.ask(prompt(50), prefiller=peer.address))

            async def has_begun() -> bool:
                return peer.asked == 1

            await until(has_begun)
            assert (await nodes.decode.node.describe()).pool.reservations > 0
            asking.cancel()

            async def has_left() -> bool:
                return peer.left == 1

            await until(has_left)
            await nodes.decode.idle()
            await nodes.decode.counted(ended=1)
        assert not nodes.decode.node.agent.picked.fallbacks

    nodes.run(scenario())


def test_a_node_that_does_not_decode_computes_all_of_it(nodes: RunningPair) -> None:
    async def scenario() -> None:
        plain = await nodes.decode.complete(prompt(60))
        fallen = await nodes.prefill.complete(prompt(60), prefiller=nodes.decode.address)
        assert tokens_of(fallen) == tokens_of(plain)
        await nodes.prefill.counted(fell_back=1)
        assert nodes.prefill.node.agent.picked.fallbacks == {"wrong_role": 1}

    nodes.run(scenario())


def test_a_node_without_room_for_the_landing_computes_all_of_it(nodes: RunningPair) -> None:
    async def scenario() -> None:
        stub, held = nodes.decode.node.stub, []
        pages = (await nodes.decode.node.describe()).pool.pages_total
        for blocks in (pages, pages // 2, pages // 4, pages // 8, pages // 16, 64, 16, 4, 2, 1, 1):
            with contextlib.suppress(grpc.aio.AioRpcError):  # no room for that many
                held.append(await stub.Reserve(pb.ReserveRequest(num_tokens=16 * blocks, prefix_only=True)))
        try:
            status, _ = await nodes.decode.ask(prompt(61, 600), prefiller=nodes.prefill.address)
            assert status == 200
            await nodes.decode.counted(fell_back=1)
            assert nodes.decode.node.agent.picked.fallbacks == {"no_capacity": 1}
        finally:
            for ticket in held:
                await stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id))

    nodes.run(scenario())


def test_tenants_have_names_of_a_length() -> None:
    assert tenant_of(" a ") == "a"
    assert tenant_of("a\udcff") == "a?"
    assert tenant_of("x" * MAX_NAME) == "x" * MAX_NAME
    long, other = tenant_of("x" * 1000), tenant_of("x" * 1001)
    assert long != other
    assert len(long) == MAX_NAME


def test_a_tenant_takes_its_turns_whatever_it_is_called(nodes: RunningPair) -> None:
    async def scenario() -> None:
        headers = {PREFILLER: nodes.prefill.address, FAIRNESS[0]: "a tenant " * 40}
        body = {"model": MODEL, "prompt": prompt(71), "max_tokens": 4}
        url = f"{nodes.decode.port.url}{COMPLETIONS}"
        async with nodes.decode.node.http.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200
            await answer.read()
        await nodes.decode.counted(handed_over=1)

    nodes.run(scenario())


def test_a_client_that_leaves_at_the_very_end_leaves_no_leg_and_is_counted(nodes: RunningPair) -> None:
    """While the node waits for the last word of the one that has prefilled."""

    async def scenario() -> None:
        async with nodes.prefill.node.http.get(f"{nodes.prefill.port.url}{PLACE_PATH}") as told:
            its_place = await told.json()
        async with StandInPeer(its_place, real=nodes.prefill.port.url).listening() as peer:
            body = {"model": MODEL, "prompt": prompt(72), "max_tokens": 4, "stream": True}
            url = f"{nodes.decode.port.url}{COMPLETIONS}"
            named = {PREFILLER: peer.address, "connection": "close"}
            async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=named) as answer:
                assert (await answer.text()).endswith("data: [DONE]\n\n")

            async def has_left() -> bool:
                return peer.left == 1

            await until(has_left)
        await nodes.decode.counted(handed_over=1)

    nodes.run(scenario())


def test_an_engine_that_dies_with_a_leg_leaves_the_prompt_to_the_other(tmp_path: Path) -> None:
    with running_pair(tmp_path, picked_leg_s=60.0) as nodes:
        prefill, decode = nodes.prefill, nodes.decode

        async def scenario() -> None:
            plain = await prefill.complete(prompt(70))
            pid = (await prefill.node.describe()).engine_pid
            os.kill(pid, signal.SIGSTOP)  # its leg does not end before it does
            asking = asyncio.ensure_future(decode.complete(prompt(70), prefiller=prefill.address))

            async def has_reserved() -> bool:
                return (await decode.node.describe()).pool.reservations > 0

            await until(has_reserved)
            os.kill(pid, signal.SIGKILL)
            assert tokens_of(await asking) == tokens_of(plain)
            await decode.counted(fell_back=1)
            assert decode.node.agent.picked.fallbacks == {"prefill_engine_unreachable": 1}
            await decode.idle()

        nodes.run(scenario())
