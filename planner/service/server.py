"""The process: waits until it leads, serves until it is told to stop, and reads the list of its gateways again on SIGHUP."""

import asyncio
import contextlib
import logging
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import aiohttp
from aiohttp import web

from planner.errors import InputError
from planner.service.app import PlanEndpoints
from planner.service.config import ServiceConfig
from planner.service.conversions import AgentConverter, NodeConverter
from planner.service.gateways import Gateways
from planner.service.keeper import Keeper
from planner.service.store import Lock, Store
from transport.path.tcp import format_address
from transport.peers.rights import SERVE_LOAD
from transport.wire.asked_servers import AskedServers

log = logging.getLogger("prfaas.plan")

STANDBY_S: Final = 0.5  # between two looks whether the leader is gone
PAUSE_S: Final = 5.0  # after an unforeseen error
CLOSE_S: Final = 1.0


@dataclass(slots=True)
class PlanService:
    """A running, leading service; `url` is where it answers."""

    keeper: Keeper
    url: str


@asynccontextmanager
async def leading(
    config: ServiceConfig, gateways: Gateways | None = None, converter: NodeConverter | None = None
) -> AsyncIterator[PlanService]:
    """A service that leads inside the block; waits for its turn first. Raises InputError, and OSError for a port.

    `gateways` may come to be others while it waits.
    """
    token, peers = config.token(), config.peers()
    config.model()  # a profile that cannot be read is no reason to wait first
    async with AsyncExitStack() as stack:
        lock = Lock(config.state_dir)
        stack.callback(lock.close)
        if not lock.taken():
            log.info("another service leads with %s: waiting for its end", config.state_dir)
            while not lock.taken():  # noqa: ASYNC110 a lock of another process does not say when it is free
                await asyncio.sleep(STANDBY_S)
        store = Store(config.state_dir, config.log_bytes)
        before = store.read()
        ledger, entry = before.led(before.term + 1, _wall(), "controller", secrets.token_hex(8))
        try:
            store.write(ledger, entry)
        except OSError as exc:
            raise InputError(f"{config.state_dir} cannot be written to: {exc}") from exc
        keeper = Keeper(
            config, store, ledger, gateways or _gateways(config),
            converter or AgentConverter(config.drain_timeout_s, config.identity), asyncio.get_running_loop().time, _wall,
        )  # fmt: skip
        http = await stack.enter_async_context(aiohttp.ClientSession())
        runner = web.AppRunner(
            PlanEndpoints(keeper, token, peers).app(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_S,
        )
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        secure = config.identity.mutual_context() if config.identity is not None and peers is not None else None
        await web.TCPSite(runner, config.host, config.port, ssl_context=secure).start()
        host = f"[{config.host}]" if ":" in config.host else config.host
        for name, work in {"looking": lambda: keeper.run(http), "converting": keeper.convert_nodes}.items():
            task = asyncio.create_task(_for_ever(name, work, keeper.failures))
            stack.push_async_callback(_ended, task)
        scheme = "http" if secure is None else "https"
        yield PlanService(keeper, f"{scheme}://{format_address(host, runner.addresses[0][1])}")


async def serve(
    config: ServiceConfig, announce: Callable[[str], None], read_again: Callable[[], ServiceConfig]
) -> None:
    """Serves until SIGTERM or SIGINT. SIGHUP has the gateways read again, before it leads, too. Raises InputError."""
    gateways, loop = _gateways(config), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, _reload, gateways, read_again)
    serving = asyncio.create_task(_serve(config, gateways, announce))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()


def _gateways(config: ServiceConfig) -> Gateways:
    """Those of the file. Raises InputError."""
    try:
        asked = AskedServers(config.identity, SERVE_LOAD) if config.identity is not None else None
    except OSError as exc:
        raise InputError(f"[plan]: {exc}") from exc
    return Gateways(config.gateways, config.poll_timeout_s, config.gateway_key(), asked)


async def _serve(config: ServiceConfig, gateways: Gateways, announce: Callable[[str], None]) -> None:
    async with leading(config, gateways) as service:
        announce(f"plan service ready url={service.url}")
        await asyncio.Event().wait()


def _reload(gateways: Gateways, read_again: Callable[[], ServiceConfig]) -> None:
    """SIGHUP: other gateways; everything else needs a restart, which costs nothing."""
    try:
        gateways.urls = read_again().gateways
    except InputError as error:
        log.error("SIGHUP: the gateways stay as they were: %s", error)
        return
    log.info("SIGHUP: %d gateways", len(gateways.urls))


async def _for_ever(name: str, work: Callable[[], Coroutine[None, None, None]], failures: Counter[str]) -> None:
    """Begins again after an unforeseen error, and counts it."""
    while True:
        try:
            await work()
        except Exception:
            failures[name] += 1
            log.exception("%s: restarted after an unforeseen error", name)
        await asyncio.sleep(PAUSE_S)


async def _ended(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _wall() -> float:
    return datetime.now(UTC).timestamp()
