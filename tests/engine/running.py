"""Servers for tests: an engine behind its HTTP surface, in this process, on a free loopback port."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from engine.agent.base import Engine
from engine.agent.link import AgentLink
from engine.byte_tokenizer import byte_text
from engine.emulated.emulated import EmulatedEngine, EmulatedTimes, emulated_layout
from engine.metrics import EngineMetrics
from engine.runtime.scheduler import Scheduler
from engine.runtime.thread import ModelThread
from engine.serving.http import OpenAIServer
from engine.serving.serving import GenerationService
from tests.engine.mini_agent import SALT, MiniAgent

MODEL = "tiny"
PATIENCE_S = 60.0  # what must happen may take this long on a machine that is busy with other things


async def until(holds: Callable[[], object]) -> None:
    """Waits for something that happens without notice."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def emulated(arch: str = "kimi_linear", **times: float) -> EmulatedEngine:
    return EmulatedEngine(emulated_layout(arch, 64), time.sleep, EmulatedTimes(**times), max_model_len=8192)


@dataclass
class Running:
    """A running engine and a client for it."""

    service: GenerationService
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": MODEL, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | body
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def tokens(self, prompt: Sequence[int], count: int, **body: Any) -> list[int]:
        status, answer = await self.post(prompt=list(prompt), max_tokens=count, **body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    async def events(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, without the closing [DONE]."""
        body = {"model": MODEL, "temperature": 0, "stream": True, "ignore_eos": True} | body
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]


@contextlib.asynccontextmanager
async def running(engine: Engine, agent: MiniAgent | None = None, **limits: int) -> AsyncIterator[Running]:
    loop = asyncio.get_running_loop()
    tokenizer = byte_text()
    scheduler = Scheduler(engine, tokenizer, time.monotonic, chunk_tokens=128)
    thread = ModelThread(scheduler, on_load=lambda: loop.call_soon_threadsafe(service.report_load))
    service = GenerationService(engine, thread, EngineMetrics(), time.monotonic, **limits)
    runner = web.AppRunner(OpenAIServer(service, tokenizer, MODEL).app(), handler_cancellation=True, shutdown_timeout=1)
    thread.start()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    link_task = None
    if agent is not None:
        service.link = AgentLink(
            agent.socket,
            engine.layout,
            model_id=MODEL,
            max_model_len=engine.max_model_len,
            http_url=url,
            on_welcome=lambda welcome: thread.set_chunk_tokens(welcome.chunk_tokens),
            on_drain=lambda: None,
            on_resume=lambda: None,
        )
        link_task = loop.create_task(service.link.run())
        assert await service.link.wait_connected(PATIENCE_S)
    try:
        async with aiohttp.ClientSession() as http:
            yield Running(service, url, http)
    finally:
        await service.close()
        if link_task is not None:
            link_task.cancel()
            await asyncio.gather(link_task, return_exceptions=True)
        await runner.cleanup()
        thread.stop(PATIENCE_S)
        assert not thread.alive


def prefill_leg(ticket: Any) -> dict[str, Any]:
    """`kv_transfer_params` of a prefill leg."""
    fields = msgspec.to_builtins(ticket)
    return {"do_remote_decode": True, "do_remote_prefill": False, "ticket": fields, "salt": SALT.hex()}


def decode_leg(transfer_id: str) -> dict[str, Any]:
    return {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id, "salt": SALT.hex()}
