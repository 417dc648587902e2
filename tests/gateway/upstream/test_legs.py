"""Connections to engines."""

import asyncio
from dataclasses import replace

import pytest

from gateway.upstream import legs
from tests.gateway.worlds import on_loop, until, world

UVICORN_CLOSES_AFTER_S = 5.0  # its `timeout_keep_alive`, which vLLM leaves alone


@pytest.mark.parametrize(("keep_alive_s", "connections"), [(60.0, 1), (0.01, 2)])
def test_a_connection_that_was_idle_is_not_used_again(
    keep_alive_s: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @on_loop
    async def scenario() -> None:
        async with world(remote=0, local=0, decode=1) as each:
            assert (await each.complete()).status == 200
            await asyncio.sleep(0.1)
            assert (await each.complete()).status == 200
            (node,) = each.nodes.nodes
            assert len(set(node.connections)) == connections

    monkeypatch.setattr(legs, "KEEP_ALIVE_S", keep_alive_s)
    scenario()


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
