"""`prfaas gateway` and `python -m gateway`: serves until told to stop, and lets running requests end."""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from gateway.assembly import running
from gateway.config.gateway import GatewayConfig, load
from gateway.construction import RunningGateway
from gateway.errors import GatewayConfigError, NotReplaced
from gateway.http.tls import server_certificate
from gateway.models.served import config_of
from gateway.routing.block_naming import name_secrets
from gateway.telemetry import log_setup as logs
from gateway.workers.generation import REPLACE, Generation, begun
from gateway.workers.handover import name_of
from gateway.workers.process_scope import (
    FIRST_CONFIG,
    ORPHANED,
    VERDICT,
    SingleProcess,
    WorkerPlace,
    WorkerProcess,
)
from gateway.workers.supervisor import NOT_REPLACED, serve_with_workers
from prompts.errors import TokenizerUnreadable
from prompts.fair_cache import FairCache
from prompts.tokens.encoder import EncoderVerdict
from prompts.tokens.tokenizer import TextTokenizer
from transport.control.python_command import python_module
from transport.control.settings import mapped
from transport.path.descriptors import raise_descriptor_limit
from transport.peers.name import PeerRole

log = logging.getLogger("prfaas.gateway")

BAD_CONFIG: Final = 2
COLLECT_AFTER: Final = 20_000  # objects; a request leaves few in circles
SWITCH_INTERVAL_S: Final = 0.001  # after which a thread that reads a prompt lets the event loop go on; Python: 5 ms
READY_S: Final = 60.0  # that a successor waits for a ready node
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
    command.add_argument(
        "--replace", action="store_true",
        help="take the place of the gateway that runs with this file, once this one sees a ready node; "
        "if none runs, start as usual",
    )  # fmt: skip
    command.add_argument(
        "--ready-within", type=float, default=READY_S, metavar="S",
        help="with --replace: give up if no node is ready by then (default: %(default)g)",
    )  # fmt: skip
    command.add_argument("--seat", metavar="JSON", help=argparse.SUPPRESS)  # of a worker
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the gateway until it is told to stop.

    0: ended in peace; 2: the configuration is wrong, or a port taken; 4: it could not replace another gateway.
    """
    arguments = parser().parse_args(argv)
    # Until the server takes it, there is nothing to read again; left alone, it would end the process.
    for number in (signal.SIGHUP, REPLACE):
        signal.signal(number, signal.SIG_IGN)
    seat = msgspec.json.decode(arguments.seat, type=WorkerPlace) if arguments.seat is not None else None
    try:
        copy = Path(seat.directory) / FIRST_CONFIG if seat is not None else None
        config = configured(arguments, copy)
        check_identity(config)
        config.plan.headers()
        server_certificate(config)
        tokenizer = read_tokenizer(config)
    except GatewayConfigError as error:
        print(f"prfaas gateway: {error}", file=sys.stderr)
        return BAD_CONFIG
    if arguments.check:
        print(f"{arguments.config}: ok")
        return 0
    try:
        return _run(config, tokenizer, arguments, seat)
    except GatewayConfigError as error:
        print(f"prfaas gateway: {error}", file=sys.stderr)
        return BAD_CONFIG
    except NotReplaced as error:
        other = "the gateway that runs goes on" if error.goes_on else "and the gateway that ran has ended"
        print(f"prfaas gateway: not replaced, {other}: {error}", file=sys.stderr)
        return NOT_REPLACED


def configured(arguments: argparse.Namespace, copy: Path | None = None) -> GatewayConfig:
    """The configuration of the file, or of a copy of it, with what the command line says instead. Raises GatewayConfigError."""
    config = load(arguments.config, copy)
    name_secrets(config.names_secret)  # a reload reads that file, too
    if arguments.workers is None:
        return config
    with mapped(GatewayConfigError):
        return replace(config, workers=arguments.workers)


def read_tokenizer(config: GatewayConfig) -> TextTokenizer:
    """The tokenizer of the default model; those of the others can be read, too. Raises GatewayConfigError."""
    first, *others = [_tokenizer_of(config, model.name) for model in config.catalog.models]
    del others  # they are read again where they are used
    return first


def _tokenizer_of(config: GatewayConfig, model: str) -> TextTokenizer:
    own = config_of(config, config.catalog, model, 1)
    assert own.tokenizer_dir is not None
    try:
        return TextTokenizer.load(own.tokenizer_dir, FairCache(config.prompt_memory_bytes))
    except TokenizerUnreadable as error:
        where = f"models.{model}: " if model else ""
        raise GatewayConfigError(f"{where}tokenizer_dir: {error}") from error


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


class StopSignals:
    """What SIGTERM and SIGINT ask for: that requests end, and, the second time, that they are cut."""

    def __init__(self, on_first: Callable[[], object] = lambda: None) -> None:
        self.stop = asyncio.Event()  # may be set without a signal, too
        self.stop_now = asyncio.Event()
        self.on_first = on_first
        self._is_first = True

    def heard(self) -> None:
        """One has come."""
        if not self._is_first:
            self.stop_now.set()
            return
        self._is_first = False
        self.stop.set()
        self.on_first()


async def serve(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    announce: Callable[[str], None],
    read_again: Callable[[], GatewayConfig],
    seat: SingleProcess | WorkerProcess | None = None,
    generation: Generation | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then until the running requests have ended; a second signal ends them too.

    SIGHUP has the configuration read again. A worker whose parent is gone leaves its ports to the next gateway, and so does
    a gateway that is replaced. They end when their clients have left. If SIGTERM comes while it starts, it ends at once.
    It raises NotReplaced then where it was to take another one's place.
    """
    own = asyncio.current_task()
    assert own is not None
    is_replacing = seat is not None and seat.ready_s is not None
    signals = StopSignals(own.cancel)
    raise_descriptor_limit()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.heard)
    try:
        await _serve(config, tokenizer, announce, read_again, signals, seat, generation)
    except asyncio.CancelledError:
        if not signals.stop.is_set():
            raise
        own.uncancel()
        if is_replacing:
            raise NotReplaced("the new one was told to end") from None
        log.info("told to end while it started")
    finally:
        if generation is not None:
            generation.stop()


async def _serve(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    announce: Callable[[str], None],
    read_again: Callable[[], GatewayConfig],
    signals: StopSignals,
    seat: SingleProcess | WorkerProcess | None,
    generation: Generation | None,
) -> None:
    loop = asyncio.get_running_loop()
    async with running(config, tokenizer, loop.time, seat, read_again, WARM_S) as gateway:
        signals.on_first = lambda: None

        def has_parent() -> bool:
            return seat is None or seat.parent in (None, os.getppid())

        def leave() -> None:
            gateway.leave_ports()
            # It still serves connections that remain, unless its parent is gone: then all ends. We may see that late: the
            # signal comes when the parent's first thread ends.
            gateway.admission.is_leaving = has_parent()
            signals.stop.set()

        loop.add_signal_handler(signal.SIGHUP, gateway.reloads.run)
        loop.add_signal_handler(ORPHANED, leave)
        ready = f"gateway ready url={gateway.url}"
        if generation is None:
            announce(ready)
        else:
            generation.take_charge(leave, lambda: announce(ready))
        await signals.stop.wait()
        if generation is not None:
            generation.retire()
        log.info("stopping: %d requests in flight", gateway.admission.in_flight)
        draining = asyncio.create_task(_drained(gateway, config.timeouts.drain_s, has_parent))
        hurry = asyncio.create_task(signals.stop_now.wait())
        await asyncio.wait([draining, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _drained(gateway: RunningGateway, timeout_s: float, has_parent: Callable[[], bool]) -> None:
    gateway.end_connections()
    if gateway.admission.is_leaving:
        await gateway.left(timeout_s, has_parent)
        gateway.admission.is_leaving = has_parent()
    if not gateway.admission.is_leaving:
        await gateway.admission.drained(timeout_s)


def _run(
    config: GatewayConfig, tokenizer: TextTokenizer, arguments: argparse.Namespace, seat: WorkerPlace | None
) -> int:
    logs.set_up(config.log_level.upper(), config.log_format)
    if config.is_in_clear and seat is None:
        log.warning(
            "%s is reached from other machines in clear: set tls_certificate and tls_key, "
            "or plain_api = true if a proxy in front of it encrypts", config.host,
        )  # fmt: skip
    if seat is not None:
        _serve_alone(config, tokenizer, arguments, log.info, WorkerProcess(seat), known=_known(seat))
        status = 0
    else:
        status = _begin(config, tokenizer, arguments)
    # The loop's handlers are gone: a second signal must not turn a clean end into a kill.
    for number in (signal.SIGTERM, signal.SIGHUP, REPLACE):
        signal.signal(number, signal.SIG_IGN)
    return status


def _begin(config: GatewayConfig, tokenizer: TextTokenizer, arguments: argparse.Namespace) -> int:
    """All processes of a gateway, or the only one."""
    with begun(
        config,
        name_of(arguments.config),
        replaces=arguments.replace,
        ready_s=arguments.ready_within,
        successor=lambda: [*_command(arguments), "--replace", "--ready-within", str(arguments.ready_within)],
    ) as generation:
        if config.workers == 1:
            seat = SingleProcess(generation.own_place())
            _serve_alone(config, tokenizer, arguments, _announce, seat, generation)
            return 0
        # Workers need not find out, each for itself, what takes seconds.
        tokenizer.encoder.hasten()
        verdict = tokenizer.encoder.verdict
        del tokenizer
        return asyncio.run(
            serve_with_workers(config, arguments.config, partial(_worker, arguments), _announce, generation, verdict)
        )


def _serve_alone(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    arguments: argparse.Namespace,
    announce: Callable[[str], None],
    seat: SingleProcess | WorkerProcess,
    generation: Generation | None = None,
    known: EncoderVerdict | None = None,
) -> None:
    tokenizer.encoder.hasten(known=known)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What is here now stays: no collection need look at it again, nor need one look at every few requests.
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    uvloop.run(serve(config, tokenizer, announce, lambda: configured(arguments), seat, generation))


def _known(seat: WorkerPlace) -> EncoderVerdict | None:
    """What the parent of a worker has found out about the tokenizer's fast encoder."""
    try:
        return msgspec.json.decode((Path(seat.directory) / VERDICT).read_bytes(), type=EncoderVerdict | None)
    except (OSError, msgspec.DecodeError) as error:
        log.warning("what is known of the tokenizer cannot be read: %s", error)
        return None


def _command(arguments: argparse.Namespace) -> list[str]:
    """What starts a process like ours."""
    asked = ["--workers", str(arguments.workers)] if arguments.workers is not None else []
    return [*python_module("gateway"), "--config", str(arguments.config), *asked]


def _worker(arguments: argparse.Namespace, seat: WorkerPlace) -> list[str]:
    """The command of a worker of ours, who are started with these arguments."""
    return [*_command(arguments), "--seat", msgspec.json.encode(seat).decode()]


def _announce(line: str) -> None:
    with contextlib.suppress(OSError):  # the disk that it is written to may be full
        print(line, flush=True)
