"""The process: builds the object graph, serves until told to stop, and lets running requests end."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from gateway.agent import AgentClient
from gateway.app import FrontDoor, build_app, build_metrics_app
from gateway.clusters import Clusters
from gateway.config import GatewayConfig
from gateway.dispatch import Dispatcher
from gateway.errors import CannotListen
from gateway.legs import Legs
from gateway.metrics import Metrics
from gateway.records import Records
from gateway.tokens import PromptReader, TextTokenizer

log = logging.getLogger("prfaas.gateway")

BEAT_S: Final = 0.25
CLIENT_KEEPALIVE_S: Final = 75.0


class Gateway:
    """A running gateway; `url` is where it answers."""

    def __init__(self, door: FrontDoor, url: str, metrics_url: str) -> None:
        self.door = door
        self.url = url
        self.metrics_url = metrics_url

    def __repr__(self) -> str:
        return f"<Gateway {self.url} [{self.door.in_flight} in flight]>"


@asynccontextmanager
async def running(
    config: GatewayConfig, tokenizer: TextTokenizer, clock: Callable[[], float]
) -> AsyncIterator[Gateway]:
    """A gateway that answers inside the block."""
    metrics = Metrics()
    agents = [AgentClient(node.agent, config.timeouts.rpc_s, config.identity, node.name) for node in config.nodes]
    clusters = Clusters(
        agents,
        clock,
        served_model=config.served_model,
        decode_slots=config.routing.decode_slots,
        link_bytes_per_s=config.routing.link_bytes_per_s,
        on_lost=metrics.node_lost,
    )
    reader = PromptReader(tokenizer, config.tokenise_threads)
    legs = Legs(config.timeouts, max_connections=2 * config.max_in_flight)
    dispatcher = Dispatcher(config, clusters, reader, legs, metrics, clock)
    records = Records(config.kept_records)
    door = FrontDoor(config, clusters, dispatcher, metrics, records, clock, int(datetime.now(UTC).timestamp()))
    clusters.start()
    chores = [asyncio.create_task(_heartbeat(door, clock))]
    if dispatcher.replicas:
        chores.append(asyncio.create_task(dispatcher.replicas.run()))
    runners: list[web.AppRunner] = []
    try:
        url = await _listen(runners, build_app(door), config.host, config.port)
        metrics_url = f"{url}/metrics"
        if config.metrics_port:
            metrics_url = await _listen(runners, build_metrics_app(door), config.host, config.metrics_port) + "/metrics"
        yield Gateway(door, url, metrics_url)
    finally:
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)
        for runner in runners:
            await runner.cleanup()
        await door.close()
        await dispatcher.close()
        await legs.close()
        await clusters.close()
        reader.close()


async def serve(config: GatewayConfig, tokenizer: TextTokenizer, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, then until the running requests have ended; a second signal ends them too."""
    loop = asyncio.get_running_loop()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with running(config, tokenizer, loop.time) as gateway:
        announce(f"gateway ready url={gateway.url}")
        await stop.wait()
        log.info("stopping: %d requests in flight", gateway.door.in_flight)
        draining = asyncio.create_task(gateway.door.drained(config.timeouts.drain_s))
        hurry = asyncio.create_task(stop_now.wait())
        await asyncio.wait([draining, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _listen(runners: list[web.AppRunner], app: web.Application, host: str, port: int) -> str:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its request here and on the nodes
        access_log=None,
        keepalive_timeout=CLIENT_KEEPALIVE_S,
        shutdown_timeout=1.0,
    )
    runners.append(runner)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CannotListen(f"cannot listen on {host}:{port}: {reason}; choose another port") from error
    bound_host, bound_port = runner.addresses[0][:2]
    return f"http://[{bound_host}]:{bound_port}" if ":" in bound_host else f"http://{bound_host}:{bound_port}"


async def _heartbeat(door: FrontDoor, clock: Callable[[], float]) -> None:
    """Measures how late the event loop is, and ends what nobody reads."""
    while True:
        due = clock() + BEAT_S
        await asyncio.sleep(BEAT_S)
        door.metrics.loop_lag(max(0.0, clock() - due))
        door.end_stalled(clock())
