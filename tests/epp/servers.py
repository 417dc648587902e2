"""Stand-ins for model servers: each says in its answer who it is and what has come to it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

HEADERS = (
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
    "x-gateway-destination-endpoint",
)


@dataclass(slots=True)
class StandInServer:
    """`waiting`, `running` and `usage` are what its /metrics says.

    `asked` counts requests of clients, `reports` those for its /metrics. A picker's own questions are not a client's.
    """

    port: int = 0
    waiting: int = 0
    running: int = 0
    usage: float = 0.0
    asked: int = 0
    reports: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)  # that requests with `x-hold` wait for
    _runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.reports += 1
        labels = '{model_name="m",engine="0"}'
        return web.Response(
            text=f"vllm:num_requests_waiting{labels} {self.waiting}.0\n"
            f"vllm:num_requests_running{labels} {self.running}.0\n"
            f"vllm:kv_cache_usage_perc{labels} {self.usage}\n"
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = await request.read()
        if "x-hold" in request.headers:
            await self.held.wait()
        if "x-events" in request.headers:
            return await self._events(request)
        said = {name: ",".join(request.headers.getall(name, ())) for name in HEADERS}
        pad = "." * int(request.headers.get("x-pad", "0"))
        digest = hashlib.sha256(body).hexdigest()
        return web.json_response(
            {"server": self.address, "bytes": len(body), "sha256": digest, "pad": pad, **said},
            status=int(request.headers.get("x-status", "200")),
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-server": self.address})
        await response.prepare(request)
        for number in range(int(request.headers["x-events"])):
            await response.write(f"data: {number} {self.address}\n\n".encode())
            await asyncio.sleep(0.005)
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def running_servers(number: int) -> AsyncIterator[list[StandInServer]]:
    """That many, started."""
    async with AsyncExitStack() as held:
        servers = [StandInServer() for _ in range(number)]
        for server in servers:
            await server.start()
            held.push_async_callback(server.stop)
        yield servers
