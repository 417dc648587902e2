"""Any picker, behind Envoy: where requests go, what becomes of bodies, what is refused."""

import asyncio
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.epp.envoy import DUPLEX, OWN, SHIPPED, STANDARD, Way
from tests.epp.servers import HEADERS
from tests.epp.world import ACT_S, ENVOY, OURS, ROOT, PickerWorld, chat, end, picker_world, until

pytestmark = pytest.mark.timeout(600)

DUPLEX_REQUEST = Way(request=DUPLEX)
STREAMED = Way(request="STREAMED", response="STREAMED", heads=True)
WAYS = {"own": OWN, "standard": STANDARD, "duplex_request": DUPLEX_REQUEST, "streamed": STREAMED}
READING = {name: way for name, way in WAYS.items() if name != "streamed"}  # they see the body before they choose
only_ours = pytest.mark.skipif(not OURS, reason="only ours promises that")
REQUESTS = 200
DROPPED = "x-llm-d-request-dropped-reason"


@pytest.fixture(params=list(WAYS.values()), ids=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def in_world(folder: Path, way: Way, act: Callable[[PickerWorld], Coroutine[Any, Any, None]], **more: Any) -> None:
    """Has `act` done in a world of its own."""

    async def acted() -> None:
        async with picker_world(folder, way, **more) as world, asyncio.timeout(ACT_S):
            await act(world)

    asyncio.run(acted())


def test_the_configuration_that_we_ship_is_valid() -> None:
    command = [ENVOY, "--mode", "validate", "--disable-hot-restart", "-c", ROOT / "deploy" / "envoy" / "envoy.yaml"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def test_a_request_is_served_by_the_server_that_the_header_names(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        for body in (chat("hello"), None):
            told = await world.ask(body)
            assert told.status == 200
            assert told.said("x-gateway-destination-endpoint") == told.said("server")

    in_world(tmp_path, way, act)


def test_no_body_is_lost(tmp_path: Path, way: Way) -> None:
    """The counter of lost bodies: answers that are 200 and empty, or other bytes than were sent."""

    async def act(world: PickerWorld) -> None:
        bodies = [chat(os.urandom(1 + index * 200).hex()) for index in range(REQUESTS)]
        room = asyncio.Semaphore(16)
        lost = {"GET": 0, "POST": 0}

        async def ask(body: bytes | None) -> None:
            async with room:
                told = await world.ask(body, x_pad="90000")
            sent = hashlib.sha256(body or b"").hexdigest()
            if told.status != 200 or not told.body or told.said("sha256") != sent or len(told.body) < 90_000:
                lost["GET" if body is None else "POST"] += 1

        await asyncio.gather(*(ask(body) for body in bodies), *(ask(None) for _ in bodies))
        assert lost == {"GET": 0, "POST": 0}

    in_world(tmp_path, way, act)


def test_a_long_body_arrives_whole(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        body = chat("x" * 3_000_000)
        told = await world.ask(body)
        assert (told.status, told.said("sha256")) == (200, hashlib.sha256(body).hexdigest())

    in_world(tmp_path, way, act)


def test_a_stream_of_events_arrives_whole(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        told = await world.ask(chat("events"), x_events="200")
        lines = [line for line in told.body.decode().split("\n") if line]
        assert [line.split()[1] for line in lines] == [*map(str, range(200)), "[DONE]"]

    in_world(tmp_path, way, act)


def test_an_empty_body_and_errors_of_servers_are_passed_on(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        told = await world.ask(chat("fails"), x_status="503")
        assert (told.status, bool(told.body)) == (503, True)
        assert (await world.ask(b"", "/v1/files")).status == 200

    in_world(tmp_path, way, act)


@pytest.mark.parametrize("way", READING.values(), ids=READING)
def test_json_that_is_none_is_refused(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        assert (await world.ask(b'{"model": "m", ')).status == 400
        await _no_server_was_asked(world)

    in_world(tmp_path, way, act)


def test_clients_that_go_away_leave_nothing_behind(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        for _ in range(3):
            before = sum(server.asked for server in world.servers)
            asking = asyncio.create_task(world.ask(chat("held"), x_hold="1"))
            await until(lambda: _asked(world), lambda asked, before=before: asked > before)
            asking.cancel()
            await asyncio.wait([asking])
        # One goes in the middle of its body.
        _, writer = await asyncio.open_connection("127.0.0.1", world.ports["api"])
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.3)  # nothing tells how far it is
        writer.close()
        assert (await world.ask(chat("after"))).status == 200
        if OURS:
            await until(lambda: world.metric("prfaas_picker_in_flight"), lambda number: number == 0)

    in_world(tmp_path, way, act)


def test_a_subset_is_kept_to(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        servers = {(await world.ask(chat(f"request {index}"))).said("server") for index in range(12)}
        assert servers == {world.servers[1].address}

    in_world(tmp_path, Way(subset=("1",)), act, servers=3)


@pytest.mark.parametrize("subset", [(), ("192.0.2.1:8000",)], ids=["empty", "ineligible"])
@pytest.mark.parametrize("request_mode", ["BUFFERED", DUPLEX])
def test_a_subset_without_a_server_is_503(tmp_path: Path, subset: tuple[str, ...], request_mode: str) -> None:
    async def act(world: PickerWorld) -> None:
        told = await world.ask(chat("hello"))
        assert (told.status, told.headers.get(DROPPED)) == (503, "rejected-no-endpoints")
        await _no_server_was_asked(world)

    in_world(tmp_path, Way(request=request_mode, subset=subset), act)


@only_ours
def test_without_a_server_that_answers_it_is_503(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        for server in world.servers:
            await server.stop()
        told = await until(lambda: world.ask(chat("hello")), lambda told: DROPPED in told.headers)
        assert told.headers[DROPPED] == "rejected-no-endpoints"
        assert (told.status, "Retry-After" in told.headers) == (503, True)

    in_world(tmp_path, STANDARD, act)


def test_a_server_that_joins_is_used_and_one_that_leaves_is_not(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        first, second = world.servers
        world.list_servers([first])
        await until(lambda: _servers_asked(world), lambda asked: asked == {first.address})
        world.list_servers([second])
        await until(lambda: _servers_asked(world), lambda asked: asked == {second.address})

    in_world(tmp_path, OWN, act)


@only_ours
def test_while_all_servers_are_saturated_what_may_wait_is_429(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        for server in world.servers:
            server.waiting = 9
        await world.reported()
        told = await world.ask(chat("later"), x_llm_d_inference_objective="batch")
        assert (told.status, told.headers[DROPPED]) == (429, "rejected-saturated")
        assert (await world.ask(chat("now"))).status == 200
        world.servers[0].waiting = 0
        await world.reported()
        told = await world.ask(chat("later"), x_llm_d_inference_objective="batch")
        assert (told.status, told.said("server")) == (200, world.servers[0].address)

    in_world(tmp_path, STANDARD, act, more=("--objective", "batch=-1"))


@only_ours
def test_while_all_servers_are_saturated_tenants_have_equal_parts(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        held = [
            asyncio.create_task(world.ask(chat(f"held {i}"), x_hold="1", x_llm_d_inference_fairness_id="greedy"))
            for i in range(6)
        ]
        await until(lambda: world.metric("prfaas_picker_in_flight"), lambda number: number == 6)
        for server in world.servers:
            server.waiting = 9
        await world.reported()
        assert (await world.ask(chat("mine"), x_llm_d_inference_fairness_id="modest")).status == 200
        other = asyncio.create_task(world.ask(chat("mine"), x_hold="1", x_llm_d_inference_fairness_id="modest"))
        await until(lambda: world.metric("prfaas_picker_in_flight"), lambda number: number == 7)
        told = await world.ask(chat("more"), x_llm_d_inference_fairness_id="greedy")
        assert (told.status, told.headers[DROPPED]) == (429, "rejected-saturated")
        for server in world.servers:
            server.held.set()
        assert {told.status for told in await asyncio.gather(*held, other)} == {200}

    in_world(tmp_path, STANDARD, act)


@only_ours
def test_what_may_wait_and_would_be_late_is_429(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        named = {"x_llm_d_inference_objective": "batch"}
        late = await world.ask(chat("x" * 400_000), **named, x_llm_d_slo_ttft_ms="100")
        assert (late.status, late.headers[DROPPED]) == (429, "rejected-saturated")
        assert (await world.ask(chat("x" * 400_000), **named, x_llm_d_slo_ttft_ms="60000")).status == 200

    in_world(tmp_path, OWN, act, more=("--objective", "batch=-1"))


def test_prompts_with_the_same_beginning_go_to_the_same_server(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        first = (await world.ask(chat("a" * 20_000))).said("server")
        again = {(await world.ask(chat("a" * 20_000, turns))).said("server") for turns in range(2, 8)}
        assert again == {first}
        servers = {(await world.ask(chat(f"{index}" * 20_000))).said("server") for index in range(9)}
        assert len(servers) > 1

    in_world(tmp_path, OWN, act, servers=3)


@pytest.mark.parametrize("way", READING.values(), ids=READING)
def test_a_prefill_server_is_named_to_the_server_that_decodes(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        prefill, decode = world.servers
        told = await world.ask(chat("y" * 20_000))
        assert (told.said("server"), told.said("x-prefiller-host-port")) == (decode.address, prefill.address)

    in_world(tmp_path, way, act, roles=("prefill", "decode"))


@only_ours
def test_a_client_names_no_server(tmp_path: Path, way: Way) -> None:
    async def act(world: PickerWorld) -> None:
        forged = [(name, f"192.0.2.1:{number}") for name in HEADERS for number in (1, 2)]
        async with world.http.post(f"{world.url}/v1/completions", data=chat("hello"), headers=forged) as answer:
            said = await answer.json()
        *others, destination = (said[name] for name in HEADERS)
        assert (others, destination) == ([""] * 4, said["server"])

    in_world(tmp_path, way, act)


@only_ours
def test_with_our_configuration_a_client_names_no_server_while_the_picker_is_gone(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        assert world.picker is not None
        await end(world.picker)
        forged = {name.replace("-", "_"): "192.0.2.1:1" for name in HEADERS}
        told = await world.ask(chat("hello"), **forged)
        assert [told.said(name) for name in HEADERS] == [""] * 5

    in_world(tmp_path, SHIPPED, act)


def test_our_configuration_leaves_the_limit_of_requests_to_the_picker(tmp_path: Path) -> None:
    """What is beyond Envoy's own limit, 1,024, would go to any server."""

    async def act(world: PickerWorld) -> None:
        async with world.http.get(f"http://127.0.0.1:{world.ports['admin']}/clusters") as page:
            limits = await page.text()
        for cluster in ("servers", "picker"):
            for limit in ("max_connections", "max_pending_requests", "max_requests"):
                assert f"{cluster}::default_priority::{limit}::20000" in limits

    in_world(tmp_path, SHIPPED, act)


@only_ours
def test_a_list_of_servers_is_tried_in_order(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        await world.servers[0].stop()
        told = [await world.ask(chat(f"{index}")) for index in range(8)]
        assert {(each.status, each.said("server")) for each in told} == {(200, world.servers[1].address)}
        assert any(each.said("x-gateway-destination-endpoint").count(",") == 1 for each in told)  # type: ignore[attr-defined]

    in_world(tmp_path, OWN, act, more=("--fallbacks", "1"))


@only_ours
def test_original_destinations_take_no_list(tmp_path: Path) -> None:
    """Why a picker for foreign gateways names one server unless it is told otherwise."""

    async def act(world: PickerWorld) -> None:
        assert (await world.ask(chat("hello"))).status == 503

    in_world(tmp_path, STANDARD, act, more=("--fallbacks", "1"))


@only_ours
def test_a_hub_reads_how_busy_the_pool_is(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        for server, (waiting, running, usage) in zip(world.servers, ((1, 6, 0.5), (3, 2, 0.25)), strict=True):
            server.waiting, server.running, server.usage = waiting, running, usage
        await world.reported()
        page = await world.metrics()
        for name, value in (("queue_size", 2.0), ("running_requests", 4.0), ("kv_cache_utilization", 0.375)):
            assert f'llm_d_epp_average_{name}{{name="test"}} {value}' in page
        assert 'llm_d_epp_ready_endpoints{name="test"} 2.0' in page

    in_world(tmp_path, OWN, act)


@asynccontextmanager
async def _streaming(world: PickerWorld) -> AsyncIterator[aiohttp.ClientResponse]:
    async with world.http.post(f"{world.url}/v1/chat/completions", data=chat("e"), headers={"x-events": "300"}) as told:
        await told.content.readline()
        yield told


def test_with_our_configuration_requests_outlive_the_picker(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        assert world.picker is not None
        async with _streaming(world) as told:
            world.picker.kill()
            await world.picker.wait()
            assert (await told.read()).endswith(b"data: [DONE]\n\n")
        assert {(await world.ask(chat("hello"))).status for _ in range(8)} == {200}

    in_world(tmp_path, OWN, act)


def test_in_full_duplex_a_killed_picker_cuts_answers_and_refuses_bodies(tmp_path: Path) -> None:
    """What Envoy does then, whatever `failure_mode_allow` says: why it is not our own configuration."""

    async def act(world: PickerWorld) -> None:
        assert world.picker is not None
        async with _streaming(world) as told:
            world.picker.kill()
            await world.picker.wait()
            with pytest.raises(aiohttp.ClientError):
                await told.read()
        assert (await world.ask(chat("hello"))).status == 500

    in_world(tmp_path, Way(request=DUPLEX, response=DUPLEX, heads=True, fails_open=True), act)


@only_ours
def test_a_picker_that_is_told_to_end_lets_streams_end(tmp_path: Path) -> None:
    async def act(world: PickerWorld) -> None:
        assert world.picker is not None
        async with _streaming(world) as told:
            world.picker.terminate()
            assert (await told.read()).endswith(b"data: [DONE]\n\n")
        assert await world.picker.wait() == 0

    in_world(tmp_path, STANDARD, act)


async def _asked(world: PickerWorld) -> int:
    return sum(server.asked for server in world.servers)


async def _servers_asked(world: PickerWorld) -> set[object]:
    told = [await world.ask(chat(f"{index} members")) for index in range(6)]
    return {each.said("server") for each in told if each.status == 200}


async def _no_server_was_asked(world: PickerWorld) -> None:
    """By a client: our picker has asked each how busy it is, and for its models."""
    if OURS:
        await world.reported()
    assert [server.asked for server in world.servers] == [0] * len(world.servers)
