import asyncio

from aiohttp import web

from node.serving import serves


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
