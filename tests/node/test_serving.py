import asyncio

import pytest
from aiohttp import web

from node import serving
from node.serving import adapters_of, serves


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


def test_adapters_are_told_whenever_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ADAPTERS_S", 0.0)
    model, terse, kind = (
        {"id": "base", "parent": None},
        {"id": "terse", "parent": "base"},
        {"id": "kind", "parent": "base"},
    )
    answers = iter([[model], [model, terse], "garbled", [model, terse], [model, terse, kind], None, [model]])

    async def models(request: web.Request) -> web.Response:
        data = next(answers)
        if data is None:
            return web.Response(status=503)
        return web.json_response({"object": "list", "data": data})

    async def scenario() -> list[tuple[str, ...]]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        told = []
        try:
            async with asyncio.timeout(30.0):
                async for adapters in adapters_of(f"http://{host}:{port}"):
                    told.append(adapters)
                    if len(told) == 3:
                        return told
        finally:
            await runner.cleanup()
        return told

    assert asyncio.run(scenario()) == [("terse",), ("kind", "terse"), ()]
