"""The process: waits until it leads, or follows others in an etcd, and serves until it is told to stop.

On SIGHUP it reads the list of its gateways again.
"""

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
from typing import Any, Final

import aiohttp
from aiohttp import web

from planner.errors import Deposed, InputError
from planner.service.announcement import AnnouncedLedger
from planner.service.app import PlanDesk, PlanEndpoints
from planner.service.config import ServiceConfig
from planner.service.conversions import AgentConverter, NodeConverter
from planner.service.etcd_store import PlansInEtcd
from planner.service.fleet import PlanMember, until_deposed
from planner.service.gateways import Gateways
from planner.service.keeper import Keeper
from planner.service.store import Lock, Store
from planner.solve.control.ledger import Ledger
from transport.path.descriptors import descriptor_limit, raise_descriptor_limit
from transport.path.guarded_port import GuardedPort
from transport.path.handshakes import HandshakePlaces
from transport.path.holders import HolderPlaces
from transport.path.tcp import format_address
from transport.peers.name import of_der
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


@dataclass(slots=True)
class FleetPlanService:
    """A running service among others."""

    member: PlanMember
    url: str


@asynccontextmanager
async def leading(
    config: ServiceConfig,
    gateways: Gateways | None = None,
    converter: NodeConverter | None = None,
    holders: HolderPlaces[Any] | None = None,
) -> AsyncIterator[PlanService]:
    """A service that leads inside the block; waits for its turn first. Raises InputError, and OSError for a port.

    `gateways` may come to be others while it waits. `holders` are the places of callers with certificates.
    """
    config.token(), config.peers()  # a file that cannot be read is no reason to wait first, either
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
            config, store, AnnouncedLedger(ledger), gateways or _gateways(config),
            converter or AgentConverter(config.drain_timeout_s, config.identity), asyncio.get_running_loop().time, _wall,
        )  # fmt: skip
        http = await stack.enter_async_context(aiohttp.ClientSession())
        url = await _answering(stack, config, lambda: keeper, holders)
        for work in _works(keeper, http):
            stack.push_async_callback(_ended, asyncio.create_task(work))
        yield PlanService(keeper, url)


@asynccontextmanager
async def taking_part(
    config: ServiceConfig,
    gateways: Gateways | None = None,
    converter: NodeConverter | None = None,
    store: PlansInEtcd | None = None,
) -> AsyncIterator[FleetPlanService]:
    """One of several services with one etcd, which leads or follows inside the block. Raises as `leading`."""
    assert config.etcd is not None
    for warning in config.warnings:
        log.warning("%s", warning)
    config.model()
    asked = gateways or _gateways(config)
    plans = store or PlansInEtcd(config.etcd, secrets.token_hex(8))
    announced = AnnouncedLedger(Ledger())
    async with AsyncExitStack() as stack:
        stack.callback(plans.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())

        def keeper() -> Keeper:
            nodes = converter or AgentConverter(config.drain_timeout_s, config.identity)
            return Keeper(config, plans, announced, asked, nodes, asyncio.get_running_loop().time, _wall)

        member = PlanMember(
            plans, announced, config.mode, keeper, lambda leading: [until_deposed(each) for each in _works(leading, http)],
            Store(config.state_dir, config.log_bytes).read, _wall,
        )  # fmt: skip
        url = await _answering(stack, config, lambda: member.desk)
        stack.push_async_callback(_ended, asyncio.create_task(member.run(config.url or url)))
        yield FleetPlanService(member, url)


async def _answering(
    stack: AsyncExitStack, config: ServiceConfig, desk: Callable[[], PlanDesk], holders: HolderPlaces[Any] | None = None
) -> str:
    """Answers over HTTP until the stack ends; returns where."""
    peers = config.peers()
    secure = config.identity.mutual_context() if config.identity is not None and peers is not None else None

    def protocol() -> asyncio.BaseProtocol:
        assert runner.server is not None
        return runner.server()

    descriptors = descriptor_limit()
    port = GuardedPort(
        protocol,
        secure,
        holder_of=None if secure is None else _holder_of,
        places=HandshakePlaces.within(descriptors),
        holders=holders if holders is not None else HolderPlaces.within(descriptors),
    )
    runner = web.AppRunner(
        PlanEndpoints(desk, config.token(), peers, config.gateway_model, port).app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=CLOSE_S,
    )
    stack.push_async_callback(runner.cleanup)
    await runner.setup()
    bound = port.start(config.host, config.port, "the plan service")
    stack.push_async_callback(port.close)
    scheme = "http" if secure is None else "https"
    return f"{scheme}://{format_address(config.host, bound)}"


def _holder_of(transport: asyncio.BaseTransport) -> str:
    """Of the certificate that a caller has shown; those without a name of ours share their places."""
    try:
        return str(of_der(transport.get_extra_info("ssl_object").getpeercert(binary_form=True)).name)
    except ValueError:
        return ""


def _works(keeper: Keeper, http: aiohttp.ClientSession) -> list[Coroutine[None, None, None]]:
    """What a leader does, for ever."""
    return [
        _for_ever("looking", lambda: keeper.run(http), keeper.failures),
        _for_ever("converting", keeper.convert_nodes, keeper.failures),
    ]


async def serve(
    config: ServiceConfig, announce: Callable[[str], None], read_again: Callable[[], ServiceConfig]
) -> None:
    """Serves until SIGTERM or SIGINT. SIGHUP has the gateways read again, before it leads, too. Raises InputError."""
    raise_descriptor_limit()  # callers have more places than a process has descriptors by default
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
    return Gateways(config.gateways, config.poll_timeout_s, config.gateway_key(), asked, config.gateway_model)


async def _serve(config: ServiceConfig, gateways: Gateways, announce: Callable[[str], None]) -> None:
    serving = leading if config.etcd is None else taking_part
    async with serving(config, gateways) as service:
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
        except Deposed:
            raise
        except OSError as error:  # of the disk, or of etcd
            failures[name] += 1
            log.error("%s: begins again, as nothing could be written down: %s", name, error)
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
