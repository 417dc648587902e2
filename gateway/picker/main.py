"""The process of an endpoint picker: `prfaas epp`."""

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import web

from gateway.errors import CannotListen, GatewayConfigError
from gateway.picker.admission import PickLimits
from gateway.picker.certificates import FollowedCertificate, TlsFiles
from gateway.picker.choosing import PickSettings, ServerPicker
from gateway.picker.metrics import CONTENT_TYPE, PickerMetrics
from gateway.picker.reports import ReportAsker
from gateway.picker.servers import ServerPool
from gateway.picker.service import ExchangeService, HealthService, grpc_listening
from gateway.tasks import TaskSet
from membership.fleet import MemberFleet
from membership.sources import FileSource, Source
from membership.view import View
from membership.watch import MembershipWatch
from transport.control.settings import SettingsError
from transport.peers.rights import SERVE
from transport.wire.asked_servers import AskedNodes
from transport.wire.identity import Identity

log = logging.getLogger("prfaas.picker")

BEGIN_S: Final = 10.0  # that a picker waits for its registries before it listens
POOL_NAME: Final = "pool"  # in metrics
TARGET_PORT: Final = 8000
CALM_S: Final = 1.0  # that it refuses what is new before it ends: proxies look at its health meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerConfig:
    """What a picker is told. A port of 0 takes any free one."""

    sources: Sequence[Source]
    pool_name: str = POOL_NAME
    host: str = "127.0.0.1"
    grpc_port: int = 9002
    health_port: int = 9003
    metrics_port: int = 9090
    tls: TlsFiles | None = None
    identity: Identity | None = None  # which PrfaaS nodes with certificates are shown; None: they are asked in clear
    settings: PickSettings = field(default_factory=PickSettings)
    limits: PickLimits = field(default_factory=PickLimits)
    max_running: int = 256
    max_body_bytes: int = 32 << 20
    max_held_bytes: int = 1 << 30
    drain_s: float = 60.0


def run(config: PickerConfig) -> int:
    """Serves until it is told to end; the exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(_serve(config))
    except GatewayConfigError as error:
        print(f"prfaas epp: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: PickerConfig) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    counts = PickerMetrics()
    credentials = None
    if config.tls is not None:
        credentials = FollowedCertificate(config.tls, counts.certificate_failed).credentials()
    nodes = _asked_nodes(config.identity)
    tasks = TaskSet(lambda name: log.error("an error of ours has ended: %s", name))
    pool = ServerPool(time.monotonic, tokens_per_s=config.settings.tokens_per_s, max_running=config.max_running)
    picker = ServerPicker(pool, config.settings, config.limits)
    counts.show(pool, picker, config.pool_name)
    service = ExchangeService(
        picker, counts, max_body_bytes=config.max_body_bytes, max_held_bytes=config.max_held_bytes
    )
    members = FollowedMembers(pool, config.sources)
    watch = MembershipWatch(members.sources, time.monotonic, members.saw, counts.registry_failed)
    health = HealthService(lambda: members.is_synced and not stop.is_set() and picker.ready > 0)
    async with AsyncExitStack() as held:
        held.push_async_callback(tasks.cancel)
        tasks.keep(watch.run, "membership")
        tasks.keep(ReportAsker(pool, counts.reported, nodes=nodes).run, "reports")
        await members.synced(BEGIN_S)
        try:
            metrics_port = await _serve_metrics(config.host, config.metrics_port, counts, held)
            health_port = await held.enter_async_context(grpc_listening(config.host, config.health_port, None, health))
            port = await held.enter_async_context(
                grpc_listening(
                    config.host,
                    config.grpc_port,
                    service,
                    health,
                    max_body_bytes=config.max_body_bytes,
                    credentials=credentials,
                )
            )
        except OSError as error:
            raise CannotListen(str(error)) from error
        print(
            f"picker ready grpc={config.host}:{port} health={config.host}:{health_port}"
            f" metrics=http://{config.host}:{metrics_port}/metrics servers={len(pool)}",
            flush=True,
        )
        await stop.wait()
        log.info("stopping: %d streams", service.streams)
        await asyncio.sleep(CALM_S)
        service.leave()
        await _drained(service, config.drain_s)


def _asked_nodes(identity: Identity | None) -> AskedNodes | None:
    """Raises GatewayConfigError."""
    try:
        return AskedNodes(identity, SERVE) if identity is not None else None
    except OSError as error:
        raise GatewayConfigError(str(error)) from error


async def _drained(service: ExchangeService, timeout_s: float) -> None:
    """Waits until no stream is open: a proxy would cut the answers of those that are."""
    try:
        async with asyncio.timeout(timeout_s):
            while service.streams:  # noqa: ASYNC110 nothing tells
                await asyncio.sleep(0.1)
    except TimeoutError:
        log.error("%d streams are cut after %g s", service.streams, timeout_s)


class FollowedMembers:
    """The pool's members, as its registries have them."""

    def __init__(self, pool: ServerPool, sources: Sequence[Source]) -> None:
        self.sources = sources
        self._pool = pool
        self._fleet = MemberFleet({source.name: View() for source in sources})
        self._seen = asyncio.Event()

    @property
    def is_synced(self) -> bool:
        """Whether every registry has been read once."""
        return self._fleet.is_synced

    def saw(self, source: str, view: View) -> None:
        """A registry has another view."""
        self._fleet = self._fleet.seen(source, view)
        if view.frozen_since is not None:
            log.error("%s is lost, its %d servers stay as they are: %s", source, len(view.members), view.reason)
        for problem in view.problems:
            log.warning("%s: %s", source, problem)
        self._pool.follow(self._fleet.members())
        if self.is_synced:
            self._seen.set()

    async def synced(self, timeout_s: float) -> None:
        """Waits for all registries, up to so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._seen.wait()
        except TimeoutError:
            log.error("not every registry has been read within %g s", timeout_s)


async def _serve_metrics(host: str, port: int, counts: PickerMetrics, held: AsyncExitStack) -> int:
    async def shown(_: web.Request) -> web.Response:
        return web.Response(body=counts.page(), headers={"content-type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", shown)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    held.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound: int = runner.addresses[0][1]
    return bound


def config_from(arguments: argparse.Namespace) -> PickerConfig:
    """What the command line says. Raises SettingsError."""
    return PickerConfig(
        sources=sources_from(arguments),
        pool_name=arguments.pool_name or POOL_NAME,
        host=arguments.host,
        grpc_port=arguments.grpc_port,
        health_port=arguments.grpc_health_port,
        metrics_port=arguments.metrics_port,
        tls=tls_from(arguments),
        identity=identity_from(arguments),
        settings=PickSettings(
            placement=arguments.placement,
            fallbacks=arguments.fallbacks,
            tokens_per_s=arguments.prefill_tokens_per_s,
        ),
        limits=PickLimits(
            queue=arguments.queue, max_in_flight=arguments.max_in_flight, priorities=dict(arguments.objective)
        ),
        drain_s=arguments.drain_timeout,
    )


def tls_from(arguments: argparse.Namespace) -> TlsFiles | None:
    """None: in clear. Raises SettingsError."""
    authority = Path(arguments.client_ca) if arguments.client_ca else None
    if not arguments.cert_path:
        if authority is not None:
            raise SettingsError("--client-ca needs --cert-path: without a certificate of its own the port is in clear")
        return None
    return TlsFiles(Path(arguments.cert_path), authority)


def identity_from(arguments: argparse.Namespace) -> Identity | None:
    """Who the picker is to PrfaaS nodes; None: they have no certificates. Raises SettingsError."""
    files = {name: getattr(arguments, f"node_{name}") for name in ("certificate", "key", "authority")}
    if not any(files.values()):
        return None
    if missing := [name for name, path in files.items() if not path]:
        raise SettingsError(
            f"--node-{missing[0]} is missing: --node-certificate, --node-key, --node-authority go together"
        )
    certificate, key, authority = map(Path, files.values())
    return Identity(certificate=certificate, key=key, authority=authority)


def sources_from(arguments: argparse.Namespace) -> Sequence[Source]:
    """The registries that the command line names. Raises SettingsError."""
    if arguments.endpoints is not None:
        return [FileSource(Path(arguments.endpoints))]
    # Its client is loaded where there is an API server.
    from membership.kubernetes.pool_source import InferencePoolSource
    from membership.kubernetes.settings import InferencePoolConfig, KubernetesConfig
    from membership.kubernetes.source import KubernetesSource

    if arguments.selector is not None:
        pods = KubernetesConfig(
            selector=arguments.selector,
            namespaces=(arguments.pool_namespace,) if arguments.pool_namespace else (),
            readiness="pod",
            server=arguments.api_server,
        )
        return [KubernetesSource(pods, server_ports=(arguments.target_port or TARGET_PORT,))]
    if not arguments.pool_name:
        raise SettingsError("name the servers: --endpoints, --selector, or their InferencePool as --pool-name")
    if arguments.target_port is not None:
        raise SettingsError(
            f"--target-port {arguments.target_port}: the InferencePool {arguments.pool_name} has its own"
        )
    pool = InferencePoolConfig(
        name=arguments.pool_name, namespace=arguments.pool_namespace, server=arguments.api_server
    )
    return [InferencePoolSource(pool)]
