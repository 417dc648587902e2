"""Connections to engines."""

import asyncio
from dataclasses import replace

from gateway.upstream import legs
from tests.gateway.worlds import on_loop, until, world

UVICORN_CLOSES_AFTER_S = 5.0  # its `timeout_keep_alive`, which vLLM leaves alone


def test_we_close_before_the_engine_does() -> None:
    assert legs.KEEP_ALIVE_S + 1.0 < UVICORN_CLOSES_AFTER_S


@on_loop
async def test_a_reload_that_admits_more_requests_gives_them_connections() -> None:
    async with world(remote=0, local=0, decode=1, max_in_flight=1) as each:
        (node,) = each.nodes.nodes
        gate = node.script.decode_gate = asyncio.Event()
        each.gateway.reload(replace(each.gateway.config, max_in_flight=3))
        asking = [asyncio.create_task(each.complete()) for _ in range(3)]
        await until(lambda: node.running == 3)
        gate.set()
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * 3
