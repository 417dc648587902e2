"""`prfaas gateway` and `python -m gateway`: serves until told to stop, and lets running requests end."""

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from gateway.assembly import RunningGateway, running
from gateway.config.gateway import GatewayConfig, load
from gateway.errors import GatewayConfigError
from gateway.http.listener import raise_descriptor_limit
from gateway.http.tls import server_certificate
from gateway.routing.block_naming import name_secrets
from gateway.telemetry import log_setup as logs
from gateway.workers.process_scope import FIRST_CONFIG, ORPHANED, VERDICT, SingleProcess, WorkerProcess
from gateway.workers.supervisor import serve_with_workers
from prompts.errors import TokenizerUnreadable
from prompts.fair_cache import FairCache
from prompts.tokens.encoder import EncoderVerdict
from prompts.tokens.tokenizer import TextTokenizer
from transport.control.python_command import python_module
from transport.control.settings import mapped
from transport.peers.name import PeerRole

log = logging.getLogger("prfaas.gateway")

BAD_CONFIG: Final = 2
COLLECT_AFTER: Final = 20_000  # objects; a request leaves few in circles
SWITCH_INTERVAL_S: Final = 0.001  # after which a thread that reads a prompt lets the event loop go on; Python: 5 ms
WARM_S: Final = 60.0  # that a gateway waits for its first process for long bodies; three on an idle machine
EXAMPLE: Final = """
  [gateway]
  host = "127.0.0.1"
  port = 8000                    # 0: any free port; it is printed
  tokenizer_dir = "models/tiny"  # tokenizer.json, tokenizer_config.json, chat_template.jinja
  threshold_tokens = 16384       # longer uncached prefills go to the remote cluster

  [[gateway.nodes]]
  agent = "127.0.0.1:7001"       # a node's gRPC address; the rest is asked of it
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="prfaas gateway",
        description="Run one gateway, an OpenAI-compatible server before the nodes that its file lists.",
        epilog=f"The file:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "-c", "--config", type=Path, required=True, metavar="FILE.toml", help="configuration with a [gateway] table"
    )
    command.add_argument("--check", action="store_true", help="only check the configuration, and exit")
    command.add_argument(
        "--workers", type=int, metavar="N", help="number of worker processes on the port (default: the file's)"
    )
    command.add_argument("--seat", nargs=3, metavar=("DIR", "NUMBER", "PORT"), help=argparse.SUPPRESS)  # of a worker
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the gateway until it is told to stop. 0: ended in peace; 2: the configuration is wrong, or a port taken."""
    arguments = parser().parse_args(argv)
    # Until the server takes it, there is nothing to read again; left alone, it would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        copy = Path(arguments.seat[0]) / FIRST_CONFIG if arguments.seat is not None else None
        config = configured(arguments, copy)
        check_identity(config)
        server_certificate(config)
        tokenizer = read_tokenizer(config)
    except GatewayConfigError as error:
        print(f"prfaas gateway: {error}", file=sys.stderr)
        return BAD_CONFIG
    if arguments.check:
        print(f"{arguments.config}: ok")
        return 0
    try:
        return _run(config, tokenizer, arguments)
    except GatewayConfigError as error:
        print(f"prfaas gateway: {error}", file=sys.stderr)
        return BAD_CONFIG


def configured(arguments: argparse.Namespace, copy: Path | None = None) -> GatewayConfig:
    """The configuration of the file, or of a copy of it, with what the command line says instead. Raises GatewayConfigError."""
    config = load(arguments.config, copy)
    name_secrets(config.names_secret)  # a reload reads that file, too
    if arguments.workers is None:
        return config
    with mapped(GatewayConfigError):
        return replace(config, workers=arguments.workers)


def read_tokenizer(config: GatewayConfig) -> TextTokenizer:
    """The tokenizer that the configuration names. Raises GatewayConfigError."""
    try:
        return TextTokenizer.load(config.tokenizer_dir, FairCache(config.prompt_memory_bytes))
    except TokenizerUnreadable as error:
        raise GatewayConfigError(f"tokenizer_dir: {error}") from error


def check_identity(config: GatewayConfig) -> None:
    """Raises GatewayConfigError now for files that no agent could be talked to with, and for another's certificate."""
    try:
        if config.identity is None:
            return
        config.identity.check()
        own = config.identity.guard().own
    except OSError as error:
        raise GatewayConfigError(str(error)) from error
    if own.role is not PeerRole.GATEWAY:
        raise GatewayConfigError(f"certificate {config.certificate}: it belongs to {own}, not to a gateway")


async def serve(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    announce: Callable[[str], None],
    read_again: Callable[[], GatewayConfig],
    seat: SingleProcess | WorkerProcess | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then until the running requests have ended; a second signal ends them too.

    SIGHUP has the configuration read again. A worker whose parent is gone leaves its ports to the next gateway.
    """
    loop = asyncio.get_running_loop()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    raise_descriptor_limit()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    def on_orphaned(gateway: RunningGateway) -> None:
        gateway.leave_ports()
        stop.set()

    async with running(config, tokenizer, loop.time, seat, read_again, WARM_S) as gateway:
        loop.add_signal_handler(signal.SIGHUP, gateway.reloads.run)
        loop.add_signal_handler(ORPHANED, on_orphaned, gateway)
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


def _run(config: GatewayConfig, tokenizer: TextTokenizer, arguments: argparse.Namespace) -> int:
    logs.set_up(config.log_level.upper(), config.log_format)
    if config.is_in_clear and arguments.seat is None:
        log.warning(
            "%s is reached from other machines in clear: set tls_certificate and tls_key, "
            "or plain_api = true if a proxy in front of it encrypts", config.host,
        )  # fmt: skip
    if arguments.seat is None and config.workers > 1:
        # Workers need not find out, each for itself, what takes seconds.
        tokenizer.encoder.hasten()
        verdict = tokenizer.encoder.verdict
        del tokenizer
        status = asyncio.run(
            serve_with_workers(config, arguments.config, partial(_worker, arguments), _announce, verdict)
        )
    else:
        tokenizer.encoder.hasten(known=_known(arguments.seat))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # What is here now stays: no collection need look at it again, nor need one look at every few requests.
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER)
        seat = _seat(arguments.seat) if arguments.seat is not None else None
        announce = _announce if seat is None else log.info
        uvloop.run(serve(config, tokenizer, announce, lambda: configured(arguments), seat))
        status = 0
    # The loop's handlers are gone: a second signal must not turn a clean end into a kill.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return status


def _known(seat: Sequence[str] | None) -> EncoderVerdict | None:
    """What the parent of a worker has found out about the tokenizer's fast encoder."""
    if seat is None:
        return None
    try:
        return msgspec.json.decode((Path(seat[0]) / VERDICT).read_bytes(), type=EncoderVerdict | None)
    except (OSError, msgspec.DecodeError) as error:
        log.warning("what is known of the tokenizer cannot be read: %s", error)
        return None


def _worker(arguments: argparse.Namespace, directory: Path, number: int, port: int) -> list[str]:
    """The command of a worker of ours, who are started with these arguments."""
    own = [*python_module("gateway"), "--config", str(arguments.config)]
    asked = ["--workers", str(arguments.workers)] if arguments.workers is not None else []
    return [*own, *asked, "--seat", str(directory), str(number), str(port)]


def _seat(words: Sequence[str]) -> WorkerProcess:
    directory, number, port = words
    return WorkerProcess(Path(directory), int(number), int(port))


def _announce(line: str) -> None:
    with contextlib.suppress(OSError):  # the disk that it is written to may be full
        print(line, flush=True)
