"""The process: builds the object graph, serves until told to stop, and lets running requests end."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from gateway.accounts import Accounts
from gateway.admit import Admission
from gateway.agent import AgentClient
from gateway.app import FrontDoor, Rooms, build_app, build_operators_app
from gateway.clusters import Clusters
from gateway.config import GatewayConfig
from gateway.connections import Gate
from gateway.decide import Decider
from gateway.dispatch import Dispatcher
from gateway.errors import ConfigError
from gateway.legs import Legs
from gateway.links import Links
from gateway.listen import OPERATORS, Listener, client_connections, descriptor_limit, raise_descriptor_limit
from gateway.metrics import Metrics
from gateway.moves import Moves
from gateway.pages import Pages
from gateway.probes import Probes
from gateway.read import Reader
from gateway.receive import Receiver
from gateway.records import Records
from gateway.relay import Relay
from gateway.replicas import Replicas
from gateway.reserve import Reservations
from gateway.run import Runner
from gateway.tasks import TaskSet
from gateway.waiting import WaitingLine
from planner.decisions.estimates import LearnedCost
from prompts.tokenizer import TextTokenizer

log = logging.getLogger("prfaas.gateway")

BEAT_S: Final = 0.25
CLOSE_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 10.0  # of a link: twice what a sender waits for a connection


@dataclass(slots=True)
class Gateway:
    """A running gateway; `url` is where it answers."""

    config: GatewayConfig
    door: FrontDoor
    admission: Admission
    decider: Decider
    line: WaitingLine
    clusters: Clusters
    links: Links
    replicas: Replicas | None
    url: str
    metrics_url: str

    def __repr__(self) -> str:
        return f"<Gateway {self.url} [{self.admission.in_flight} in flight]>"

    def reload(self, config: GatewayConfig) -> list[str]:
        """Takes over what may change while it runs; the keys that differ and may not are returned."""
        possible = self.config.with_changes_of(config)
        self.decider.configure(possible)
        self.admission.limit = possible.max_in_flight
        self.line.limit = possible.max_waiting
        logging.getLogger().setLevel(possible.log_level.upper())
        self.config = possible
        return possible.differences(config)


@asynccontextmanager
async def running(
    config: GatewayConfig, tokenizer: TextTokenizer, clock: Callable[[], float]
) -> AsyncIterator[Gateway]:
    """A gateway that answers inside the block."""
    metrics = Metrics()
    now = asyncio.get_running_loop().time
    chores, watches, afterwards, requests = (TaskSet(metrics.unforeseen) for _ in range(4))
    agents = [AgentClient(node.agent, config.timeouts.rpc_s, config.identity, node.name) for node in config.nodes]
    cost = LearnedCost(config.routing.prefill_tokens_per_s)
    clusters = Clusters(
        agents,
        clock,
        served_model=config.served_model,
        decode_slots=config.routing.decode_slots,
        tasks=watches,
        on_lost=metrics.node_lost,
        on_renamed=cost.forget,
    )
    links = Links(clusters.nodes, clock, config.routing.link_bytes_per_s, metrics.link_failed)
    records = Records(config.kept_records)
    accounts = Accounts(metrics, records, clock)
    decider = Decider(config, clusters, links, cost, clock)
    legs = Legs(config.timeouts, max_connections=2 * config.max_in_flight)
    moves = Moves(
        metrics,
        afterwards,
        clock,
        limit=config.routing.max_moves,
        timeout_s=config.routing.move_timeout_s,
        on_moved=decider.learn_move,
        on_failed=decider.learn_late_move,
    )
    replicas = Replicas(clusters, moves, clock) if config.routing.replicate else None
    admission = Admission(config.max_in_flight, metrics.in_flight.set)
    line = WaitingLine(
        clock, limit=config.max_waiting, patience_s=config.timeouts.room_s, on_change=metrics.waiting.set
    )
    rooms = Rooms(
        receiver=Receiver(config.strangers, config.max_body_bytes, config.timeouts.body_s, now),
        admission=admission,
        reader=Reader(tokenizer, afterwards, threads=config.tokenise_threads, timeout_s=config.timeouts.read_s),
        dispatcher=Dispatcher(
            clusters,
            decider,
            Reservations(clusters, afterwards, config.timeouts.reservation_ttl_s),
            Runner(
                clusters, links, legs, moves, decider, accounts, requests, config.max_attempts, config.timeouts.room_s
            ),
            accounts,
            replicas,
            line,
            clock,
            config.max_attempts,
        ),
        relay=Relay(accounts, requests, clock),
        accounts=accounts,
    )
    door = FrontDoor(config, rooms, clusters, metrics, requests, clock)
    pages = Pages(clusters, links, cost, admission, metrics, records, int(datetime.now(UTC).timestamp()))
    gates = [
        Gate("clients", client_connections(config, descriptor_limit()), config.strangers, metrics, now),
        Gate("operators", OPERATORS, config.strangers, metrics, now),
    ]
    clusters.start()
    chores.keep(lambda: _heartbeat(door, gates, clock), "heartbeat")
    chores.keep(Probes(links, afterwards, PROBE_TIMEOUT_S).run, "probes")
    if replicas:
        chores.keep(replicas.run, "replicas")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(rooms.reader.close)
        stack.push_async_callback(clusters.close)
        stack.push_async_callback(legs.close)
        stack.push_async_callback(afterwards.join, max(config.timeouts.rpc_s, config.routing.move_timeout_s))
        stack.push_async_callback(requests.join, CLOSE_S)
        stack.push_async_callback(chores.cancel)
        idle_s = config.strangers.idle_s
        clients = await Listener.start(build_app(door, pages), gates[0], config.host, config.port, idle_s)
        stack.push_async_callback(clients.close)
        metrics_url = f"{clients.url}/metrics"
        if config.metrics_port:
            app = build_operators_app(door, pages)
            operators = await Listener.start(app, gates[1], config.host, config.metrics_port, idle_s)
            stack.push_async_callback(operators.close)
            metrics_url = f"{operators.url}/metrics"
        yield Gateway(config, door, admission, decider, line, clusters, links, replicas, clients.url, metrics_url)


async def serve(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    announce: Callable[[str], None],
    read_again: Callable[[], GatewayConfig],
) -> None:
    """Serves until SIGTERM or SIGINT, then until the running requests have ended; a second signal ends them too.

    SIGHUP has the configuration read again.
    """
    loop = asyncio.get_running_loop()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    raise_descriptor_limit()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    async with running(config, tokenizer, loop.time) as gateway:
        loop.add_signal_handler(signal.SIGHUP, _reload, gateway, read_again)
        announce(f"gateway ready url={gateway.url}")
        await stop.wait()
        log.info("stopping: %d requests in flight", gateway.admission.in_flight)
        draining = asyncio.create_task(gateway.admission.drained(config.timeouts.drain_s))
        hurry = asyncio.create_task(stop_now.wait())
        await asyncio.wait([draining, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _reload(gateway: Gateway, read_again: Callable[[], GatewayConfig]) -> None:
    """SIGHUP: what can change while the gateway runs does; the log says what cannot."""
    try:
        refused = gateway.reload(read_again())
    except ConfigError as error:
        gateway.door.metrics.reloaded("refused")
        log.error("SIGHUP: the configuration stays as it was: %s", error)
        return
    gateway.door.metrics.reloaded("partial" if refused else "ok")
    if refused:
        log.warning("SIGHUP: reloaded, but for what only a restart changes: %s", ", ".join(refused))
    else:
        log.info("SIGHUP: configuration reloaded")


async def _heartbeat(door: FrontDoor, gates: list[Gate], clock: Callable[[], float]) -> None:
    """Measures how late the event loop is, and ends what nobody reads and connections nobody uses."""
    while True:
        due = clock() + BEAT_S
        await asyncio.sleep(BEAT_S)
        door.metrics.loop_lag(max(0.0, clock() - due))
        door.end_stalled(clock())
        for gate in gates:
            gate.sweep()
