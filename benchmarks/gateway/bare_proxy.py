"""The floor that benchmarks.gateway measures against: aiohttp and uvloop passing bytes on, knowing nothing of them.

python -m benchmarks.gateway.bare_proxy http://127.0.0.1:9001 …      prints its port as JSON, serves until its standard input
closes
"""

import asyncio
import itertools
import json
import sys

import aiohttp
import uvloop
from aiohttp import web


async def main(engines: list[str]) -> None:
    turns = itertools.cycle(engines)

    async def pass_on(http: web.Request) -> web.StreamResponse:
        body = await http.read()
        headers = {"Content-Type": http.content_type}
        async with session.post(next(turns) + http.path, data=body, headers=headers) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            response.content_length = answer.content_length
            await response.prepare(http)
            while chunk := await answer.content.readany():
                await response.write(chunk)
            return response

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/{path:.*}", pass_on)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
