"""A server's page of metrics."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from gateway.picker.reports import ReportAsker, read_report
from gateway.picker.servers import ServerPool, ServerReport
from membership.member import Member
from tests.gateway.worlds import until

Asked = tuple[Mapping[str, ServerReport], Counter[str]]

PAGE = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running_total 99
vllm:num_requests_waiting 4
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5 1700000000
"""


def test_engines_of_one_server_are_added_up() -> None:
    assert read_report(PAGE) == ServerReport(running=5, waiting=4, kv_usage=0.5)


def test_a_page_without_them_says_nothing() -> None:
    assert read_report("up 1\n") == ServerReport()


@pytest.mark.parametrize("line", ["vllm:num_requests_running", 'vllm:num_requests_waiting{a="b"} many'])
def test_what_is_no_number_is_an_error(line: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        read_report(line)


async def _asked(
    pages: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], ends: Callable[[Counter[str]], object]
) -> Asked:
    """What servers with these pages have said, and how often each outcome came, once that `ends` it."""
    pool = ServerPool(time.monotonic, tokens_per_s=1.0, max_running=1)
    outcomes = Counter[str]()
    async with AsyncExitStack() as held:
        members = {}
        for name, page in pages.items():
            app = web.Application()
            app.router.add_get("/metrics", page)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            held.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            members[name] = Member(id=name, agent=f"127.0.0.1:{runner.addresses[0][1]}")
        pool.follow(members)
        asking = asyncio.create_task(ReportAsker(pool, lambda outcome: outcomes.update([outcome]), 0.05).run())
        await until(lambda: ends(outcomes))
        asking.cancel()
        await asyncio.wait([asking])
    return {server.id: server.report for server in pool}, outcomes


async def _whole(_: web.Request) -> web.Response:
    return web.Response(text=PAGE)


async def _in_two(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    half = PAGE.index("running_total")
    await answer.write(PAGE[:half].encode())
    await asyncio.sleep(0.05)
    await answer.write(PAGE[half:].encode())
    return answer


async def _never(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def _endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"#" * (1 << 20))


def test_a_server_says_which_models_it_has() -> None:
    async def scenario() -> list[frozenset[str]]:
        async def cards(_: web.Request) -> web.Response:
            return web.json_response({"object": "list", "data": [{"id": "a"}, {"id": "tuned", "parent": "a"}]})

        pool = ServerPool(time.monotonic, tokens_per_s=1.0, max_running=1)
        app = web.Application()
        app.router.add_get("/metrics", _whole)
        app.router.add_get("/v1/models", cards)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pool.follow({"s": Member(id="s", agent=f"127.0.0.1:{runner.addresses[0][1]}")})
        asking = asyncio.create_task(ReportAsker(pool, lambda outcome: None, 0.05).run())
        async with asyncio.timeout(30.0):
            while not all(server.models for server in pool):  # noqa: ASYNC110 nothing tells
                await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.wait([asking])
        await runner.cleanup()
        return [server.models for server in pool]

    assert asyncio.run(scenario()) == [{"a", "tuned"}]


def test_a_page_that_comes_in_parts_is_read_whole() -> None:
    reports, _ = asyncio.run(_asked({"a": _in_two}, lambda outcomes: outcomes["read"]))
    assert reports == {"a": ServerReport(running=5, waiting=4, kv_usage=0.5)}


def test_a_server_that_does_not_answer_holds_up_no_other() -> None:
    asyncio.run(_asked({"a": _whole, "b": _never}, lambda outcomes: outcomes["read"] >= 4))


def test_a_page_without_an_end_is_not_read() -> None:
    reports, outcomes = asyncio.run(_asked({"a": _endless}, Counter[str].total))
    assert reports == {"a": ServerReport()}
    assert not outcomes["read"]
