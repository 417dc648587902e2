"""What the port of picked requests answers besides, and whom."""

import asyncio
import gc
import io
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.picker.reports import read_report
from node.picked.bodies import CHAT
from node.picked.legs import LEG_PATH, PLACE_PATH
from node.picked.port import PREFILLER
from tests.node.picked.nodes import (
    MODEL,
    START_S,
    RunningPair,
    StandInPeer,
    picked_node,
    running_pair,
    ssl_of,
    tokens_of,
)
from tests.node.running import alone, until
from tests.peers import Peers
from transport.peers.name import PeerName, PeerRole
from transport.peers.rights import ASK_LEG, ASK_PICKED, CALL_PICKED


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    with running_pair(tmp_path_factory.mktemp("picked_port")) as running:
        yield running


def test_a_picker_reads_how_busy_the_node_is_and_what_it_serves(nodes: RunningPair) -> None:
    async def scenario() -> None:
        http, url = nodes.decode.node.http, nodes.decode.port.url
        async with http.get(f"{url}/metrics") as page:
            report = read_report(await page.text())
        assert (report.running, report.waiting) == (0, 0)
        async with http.get(f"{url}/v1/models") as models:
            assert [each["id"] for each in (await models.json())["data"]] == [MODEL]
        async with http.get(f"{url}/health") as health:
            assert health.status == 200
        async with http.get(f"{url}/v1/embeddings") as unknown:
            assert unknown.status == 404

    nodes.run(scenario())


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"model": "tiny", "prompt": "a", "kv_transfer_params": {"transfer_id": "x"}}', 400, "unsupported_parameter"),
        (b'{"model": "tiny", "prompt": "a", "cache_salt": 3}', 400, "invalid_value"),
        (b'{"model": "other", "prompt": "a"}', 404, "model_not_found"),
        (b'{"model": "tiny", "prompt": "' + b"x" * (33 << 20) + b'"}', 413, "request_too_large"),
    ],
)
def test_a_request_that_cannot_be_asked_for_is_told_why(
    nodes: RunningPair, body: bytes, status: int, code: str
) -> None:
    async def scenario() -> None:
        url = f"{nodes.decode.port.url}/v1/completions"
        async with nodes.decode.node.http.post(url, data=io.BytesIO(body)) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["code"] == code

    nodes.run(scenario())


@pytest.mark.parametrize("asked", [b"{}", b"[]", b'{"request_id": "a", "tokens": [1], "ticket": {}, "salt": ""}'])
def test_a_leg_that_is_none_is_refused(nodes: RunningPair, asked: bytes) -> None:
    async def scenario() -> None:
        async with nodes.prefill.node.http.post(f"{nodes.prefill.port.url}{LEG_PATH}", data=asked) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "bad_leg")

    nodes.run(scenario())


def test_a_stream_comes_as_it_is_computed_and_keeps_its_id(nodes: RunningPair) -> None:
    async def scenario() -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "of rivers " * 40}],
            "stream": True,
            "max_tokens": 5,
        }
        headers = {PREFILLER: nodes.prefill.address, "x-request-id": "mine"}
        async with nodes.decode.node.http.post(f"{nodes.decode.port.url}{CHAT}", json=body, headers=headers) as answer:
            assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
            assert answer.headers["content-type"].startswith("text/event-stream")
            said = await answer.text()
        assert said.endswith("data: [DONE]\n\n")
        assert "kv_transfer_params" not in said

        async def is_told() -> bool:
            page = (await nodes.decode.node.get("/metrics"))[1]
            return 'prfaas_picked_requests_total{cluster="west",outcome="handed_over"}' in page

        await until(is_told)  # its outcome is known after its last byte

    nodes.run(scenario())


def test_a_body_is_not_kept_for_as_long_as_its_answer_streams(nodes: RunningPair) -> None:
    async def scenario() -> None:
        asked = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 30_000, "stream": True, "ignore_eos": True}
        text = json.dumps(asked | {"metadata": {"long": "a" * (8 << 20)}}).encode()
        tracemalloc.start()
        try:
            url = f"{nodes.decode.port.url}/v1/completions"
            async with nodes.decode.node.http.post(url, data=io.BytesIO(text)) as answer:
                await answer.content.readany()
                gc.collect()
                kept, _ = tracemalloc.get_traced_memory()
                assert nodes.decode.port.held.num_bytes == 0
                assert kept < len(text) // 4
        finally:
            tracemalloc.stop()

    nodes.run(scenario())


def test_a_node_is_not_idle_while_it_reads_what_it_is_asked(nodes: RunningPair) -> None:
    """It would end under requests that its engine has not heard of."""

    async def scenario() -> None:
        agent, has_begun, may_end = nodes.decode.node.agent, asyncio.Event(), asyncio.Event()

        async def parts() -> AsyncIterator[bytes]:
            yield b'{"model": "tiny", '
            has_begun.set()
            await may_end.wait()
            yield b'"prompt": [5, 6, 7], "max_tokens": 1}'

        async def idle() -> bool:
            return agent.is_idle()

        async def busy() -> bool:
            return not agent.is_idle()

        await until(idle)
        url = f"{nodes.decode.port.url}/v1/completions"
        asking = asyncio.ensure_future(nodes.decode.node.http.post(url, data=parts()))
        await has_begun.wait()
        await until(busy)
        may_end.set()
        (await asking).close()
        await until(idle)

    nodes.run(scenario())


def test_an_engine_that_is_gone_is_told_before_an_answer_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with picked_node(tmp_path) as node:
            await node.node.agent.wait_ready(START_S)
            async with node.node.http.get(f"{node.port.url}/metrics") as page:
                assert page.status == 200
            await node.node.agent.supervisor.stop(5.0)
            async with node.node.http.get(f"{node.port.url}/metrics") as page:
                assert page.status == 503  # so that pickers leave it out
            status, told = await node.ask([5, 6, 7])
            assert (status, told["error"]["code"]) == (503, "engine_unreachable")

    alone(scenario())


def tls(who: Any) -> dict[str, Any]:
    return {"certificate": str(who.certificate), "key": str(who.key), "authority": str(who.authority)}


def test_with_certificates_gateways_ask_for_answers_and_decode_nodes_for_legs(peers: Peers, tmp_path: Path) -> None:
    names = {role: f"n-{role}" for role in ("prefill", "decode")}
    own = {role: peers.issue(PeerName("prfaas", "west", PeerRole.NODE, name)) for role, name in names.items()}
    gateway, node_of_east, prefill_of_east = (
        peers.by_role[role] for role in (PeerRole.GATEWAY, PeerRole.NODE, PeerRole.PREFILL)
    )

    async def statuses(url: str, who: Any) -> list[int | str]:
        """Of an answer, and of what nodes ask each other."""
        found: list[int | str] = []
        async with aiohttp.ClientSession() as http:
            for method, path in (("GET", "/v1/models"), ("GET", PLACE_PATH), ("POST", LEG_PATH)):
                try:
                    async with http.request(method, f"{url}{path}", data=b"{}", ssl=ssl_of(who)) as answer:
                        found.append(answer.status)
                except aiohttp.ClientError:
                    found.append("cut")
        return found

    async def scenario() -> None:
        async with (
            picked_node(tmp_path, role="prefill", node_id=names["prefill"], **tls(own["prefill"])) as prefill,
            picked_node(tmp_path, role="decode", node_id=names["decode"], **tls(own["decode"])) as decode,
        ):
            await prefill.node.agent.wait_ready(START_S)
            await decode.node.agent.wait_ready(START_S)
            prefill, decode = (replace(each, shown=gateway) for each in (prefill, decode))
            prompt = [4 + place % 300 for place in range(300)]
            plain = await prefill.complete(prompt)
            handed = await decode.complete(prompt, prefiller=prefill.address)
            assert tokens_of(handed) == tokens_of(plain)
            await decode.counted(handed_over=1)

            url, guard = prefill.port.url, prefill.node.agent.guard
            assert guard is not None
            assert await statuses(url, gateway) == [200, 403, 403]
            assert guard.refused[ASK_LEG, PeerRole.GATEWAY] == 2
            assert await statuses(url, node_of_east) == [403, 200, 400]
            assert guard.refused[ASK_PICKED, PeerRole.NODE] == 1
            assert await statuses(url, prefill_of_east) == ["cut"] * 3
            assert guard.refused[CALL_PICKED, PeerRole.PREFILL] > 0
            assert await statuses(url, peers.stranger) == ["cut"] * 3
            inner = prefill.node.agent.config  # a process of this machine that finds the port behind the front
            assert inner.identity is not None

    async def a_peer_that_is_no_node() -> None:
        """A server with a certificate of ours that is no node's is told nothing."""
        asked = 0

        async def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked += len(await reader.read(1))
            writer.close()

        server = await asyncio.start_server(taken, "127.0.0.1", 0, ssl=gateway.server_context())
        async with server, picked_node(tmp_path, node_id=names["decode"], **tls(own["decode"])) as decode:
            await decode.node.agent.wait_ready(START_S)
            decode = replace(decode, shown=gateway)
            port = server.sockets[0].getsockname()[1]
            await decode.complete([4 + place % 300 for place in range(200)], prefiller=f"127.0.0.1:{port}")
            await decode.counted(fell_back=1)
            assert decode.node.agent.picked.fallbacks == {"unreachable": 1}
        assert asked == 0

    async def a_node_that_says_it_is_another() -> None:
        """Its certificate is a node's, and not that of the node that it says it is: it is not told the prompt."""
        async with picked_node(tmp_path, node_id=names["decode"], peers=("west/*",), **tls(own["decode"])) as decode:
            await decode.node.agent.wait_ready(START_S)
            pages = decode.node.agent.pages
            assert pages is not None
            decode = replace(decode, shown=gateway)
            place = {"place": "west/n-prefill", "layout_fingerprint": pages.layout.fingerprint}
            secure = node_of_east.server_context("http/1.1")
            async with StandInPeer(place, {"delivered": True}).listening(secure) as peer:
                await decode.complete([4 + place % 300 for place in range(200)], prefiller=peer.address)
            await decode.counted(fell_back=1)
            assert decode.node.agent.picked.fallbacks == {"prefill_unreachable": 1}
            assert peer.asked == 0

    alone(scenario())
    alone(a_peer_that_is_no_node())
    alone(a_node_that_says_it_is_another())


def test_errors_are_json(nodes: RunningPair) -> None:
    async def scenario() -> None:
        async with nodes.decode.node.http.post(f"{nodes.decode.port.url}{CHAT}", data=b"no") as answer:
            assert set(json.loads(await answer.text())["error"]) == {"message", "type", "param", "code"}

    nodes.run(scenario())
