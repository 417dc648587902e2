import asyncio
import itertools

import pytest
from aiohttp import web

from node.engine.http_status import follow_adapters, follow_loads, serves
from transport.control.messages import LoadReport


def test_an_engine_serves_once_its_health_is_well() -> None:
    asked = 0

    async def health(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=503 if asked < 3 else 200)

    async def scenario() -> None:
        app = web.Application()
        app.add_routes([web.get("/health", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with asyncio.timeout(30.0):
                await serves(f"http://{host}:{port}")
        finally:
            await runner.cleanup()

    asyncio.run(scenario())
    assert asked == 3


def test_nobody_listening_is_waited_out() -> None:
    async def scenario() -> bool:
        try:
            async with asyncio.timeout(0.6):
                await serves("http://127.0.0.1:1")
        except TimeoutError:
            return False
        return True

    assert not asyncio.run(scenario())


def test_adapters_are_told_whenever_they_change() -> None:
    model, terse, kind = (
        {"id": "base", "parent": None},
        {"id": "terse", "parent": "base"},
        {"id": "kind", "parent": "base"},
    )
    answers = itertools.chain(
        [[model], [model, terse], "garbled", "deep", [model, terse], [model, terse, kind], None],
        itertools.repeat([model]),
    )

    async def models(request: web.Request) -> web.Response:
        data = next(answers)
        if data is None:
            return web.Response(status=503)
        if data == "deep":
            return web.Response(text=f'{{"data": [], "of": {"[" * 100_000}{"]" * 100_000}}}')
        return web.json_response({"object": "list", "data": data})

    async def scenario() -> list[tuple[str, ...]]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        told: list[tuple[str, ...]] = []
        try:
            following = asyncio.create_task(follow_adapters(f"http://{host}:{port}", told.append, every_s=0.0))
            async with asyncio.timeout(30.0):
                while len(told) < 3:  # noqa: ASYNC110 it is told by calls
                    await asyncio.sleep(0.01)
            following.cancel()
            await asyncio.wait([following])
        finally:
            await runner.cleanup()
        return told

    assert asyncio.run(scenario()) == [("terse",), ("kind", "terse"), ()]


def test_loads_are_told_whenever_they_change(caplog: pytest.LogCaptureFixture) -> None:
    idle = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_waiting_uncached_tokens": 0, "max_running_requests": 8}
    busy = idle | {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 700}
    answers = itertools.chain(
        [[idle], [idle], None, None, "garbled", "garbled", [busy], None, [busy]], itertools.repeat([idle])
    )

    async def loads(request: web.Request) -> web.Response:
        told = next(answers)
        return web.Response(status=503) if told is None else web.json_response({"version": "0.5.23", "loads": told})

    async def scenario() -> list[LoadReport]:
        app = web.Application()
        app.add_routes([web.get("/v1/loads", loads)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        found: list[LoadReport] = []
        try:
            following = asyncio.create_task(follow_loads(f"http://{host}:{port}", found.append, every_s=0.0))
            async with asyncio.timeout(30.0):
                while len(found) < 3:  # noqa: ASYNC110 it is told by calls
                    await asyncio.sleep(0.01)
            following.cancel()
            await asyncio.wait([following])
        finally:
            await runner.cleanup()
        return found

    nothing = LoadReport(running=0, waiting=0, queued_tokens=0, slots=8)
    assert asyncio.run(scenario()) == [nothing, LoadReport(running=3, waiting=2, queued_tokens=700, slots=8), nothing]
    troubles = [
        record.message.partition("understood: ")[2][:15]
        for record in caplog.records
        if record.name == "node.engine.http_status"
    ]
    assert troubles == ["status 503", "ValidationError", "status 503"], "one line a trouble"
