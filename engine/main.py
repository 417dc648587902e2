"""`python -m engine`: one model, one HTTP port, one connection to the node's agent."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web

from engine.agent.base import Engine
from engine.agent.identity import default_memory, model_type
from engine.agent.link import AgentLink
from engine.byte_tokenizer import byte_text
from engine.emulated.emulated import GROUPS, EmulatedEngine, EmulatedTimes, emulated_layout
from engine.emulated.paced import PacedModel, PacedScheduler
from engine.emulated.standin import StandIn, constant, read_stand_in
from engine.errors import EngineError, ModelError, StageDied
from engine.metrics import EngineMetrics
from engine.openai.unsupported import not_done_json
from engine.runtime.runner import ModelRunner
from engine.runtime.scheduler import MAX_RUNNING, Scheduler, no_chunk
from engine.runtime.thread import ModelThread
from engine.serving.http import MAX_BODY_BYTES, OpenAIServer
from engine.serving.serving import MAX_REQUESTS, GenerationService
from engine.staged.staged import StagedEngine
from engine.torch.tiny import RECIPES
from prompts.errors import TokenizerUnreadable
from prompts.tokens.tokenizer import TextTokenizer
from transport.control.last_words import CANNOT_SERVE
from transport.control.messages import Welcome
from transport.path.tcp import format_address

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE: Final = 64
DEFAULT_CHUNK_TOKENS: Final = 512
AGENT_TIMEOUT_S: Final = 30.0
DRAIN_TIMEOUT_S: Final = 600.0
# The event loop shares the interpreter with the model's thread; 5 ms, Python's default, would be felt in every stream.
SWITCH_INTERVAL_S: Final = 0.0005
EXIT_USAGE: Final = 2
EXIT_NO_AGENT: Final = 3
EXIT_MODEL_DIED: Final = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    engine: Engine
    tokenizer: TextTokenizer
    name: str
    stand_in: StandIn | None = None  # whose times are kept, where nothing is computed


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        model = _load(args)
    except StageDied as exc:
        print(f"engine: {exc}", file=sys.stderr)
        return EXIT_MODEL_DIED
    except (EngineError, TokenizerUnreadable) as exc:
        print(f"{CANNOT_SERVE}{exc}", file=sys.stderr)
        return EXIT_USAGE
    try:
        with contextlib.closing(model.engine), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(model, args))
    except OSError as exc:
        print(
            f"engine: cannot listen on {format_address(args.host, args.port)}: {exc.strerror or exc}", file=sys.stderr
        )
        return EXIT_USAGE


async def _serve(model: LoadedModel, args: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    stop, orphaned, parent = asyncio.Event(), asyncio.Event(), os.getppid()

    def told_to_stop() -> None:
        # The kernel sends SIGTERM when the supervisor was killed: the engine waits for nothing, as its successor needs
        # the port.
        if os.getppid() != parent:
            orphaned.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop)
    model_runner = _runner(
        model,
        args,
        on_load=lambda: _on_loop(loop, service.report_load),
        on_death=lambda: _on_loop(loop, stop.set),
    )
    service = GenerationService(
        model.engine, model_runner, EngineMetrics(), time.monotonic, max_requests=args.max_requests
    )
    server = OpenAIServer(service, model.tokenizer, model.name, max_body_bytes=args.max_body_bytes)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    model_runner.start()
    try:
        url = await _listen(runner, args.host, args.port)
        async with _agent_link(service, model, args, url, stop) as connected:
            if not connected:
                print(f"engine: no agent answers at {args.agent_socket}", file=sys.stderr)
                return EXIT_NO_AGENT
            if not stop.is_set():
                with contextlib.suppress(OSError):  # a log's disk may be full
                    print(f"engine ready url={url}", flush=True)
            await stop.wait()
            await _drain(service, args.drain_timeout_s, orphaned)
    finally:
        await service.close()
        await runner.cleanup()
        died = not model_runner.alive
        model_runner.stop(timeout_s=5.0)
    return EXIT_MODEL_DIED if died else 0


def _runner(
    model: LoadedModel, args: argparse.Namespace, on_load: Callable[[], None], on_death: Callable[[], None]
) -> ModelRunner:
    if model.stand_in is not None:
        assert isinstance(model.engine, EmulatedEngine)
        paced = PacedScheduler(
            model.engine,
            model.tokenizer,
            time.monotonic,
            model.stand_in,
            chunk_tokens=args.chunk_tokens,
            stages=args.stages,
        )
        return PacedModel(paced, time.monotonic, on_load, on_death)
    scheduler = Scheduler(
        model.engine, model.tokenizer, time.monotonic, chunk_tokens=args.chunk_tokens, max_running=args.max_running
    )
    thread = ModelThread(scheduler, on_load, on_death)
    model.engine.listen(thread.wake)
    return thread


async def _drain(service: GenerationService, timeout_s: float, orphaned: asyncio.Event) -> None:
    log.info("draining %d requests", service.active)
    waits = [asyncio.create_task(service.drain(timeout_s)), asyncio.create_task(orphaned.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    if service.active:
        why = "the supervisor is gone" if orphaned.is_set() else f"{timeout_s:g} s have passed"
        log.warning("%d requests cut off: %s", service.active, why)


def _on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """From the model's thread; a closed loop has no more use for news."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound_port = runner.addresses[0][1]
    return f"http://{format_address(host, bound_port)}"


@contextlib.asynccontextmanager
async def _agent_link(
    service: GenerationService, model: LoadedModel, args: argparse.Namespace, url: str, stop: asyncio.Event
) -> AsyncIterator[bool]:
    """Keeps the link up while the block runs; yields whether the agent answered in time (True without one to ask)."""
    if args.agent_socket is None:
        yield True
        return
    link = AgentLink(
        args.agent_socket,
        model.engine.layout,
        model_id=model.name,
        max_model_len=model.engine.max_model_len,
        http_url=url,
        not_done_json=not_done_json(),
        on_welcome=lambda welcome: _obey(welcome, service, model.engine.layout.block_size),
        on_drain=service.refuse_new,
        on_resume=service.resume,
        hold=model.engine.hold if isinstance(model.engine, StagedEngine) else None,
    )
    service.link = link
    task = asyncio.create_task(link.run(), name="agent link")
    try:
        yield await _answered(link, args.agent_timeout_s, stop)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _answered(link: AgentLink, timeout_s: float, stop: asyncio.Event) -> bool:
    """Waits for the agent, or for being told to stop (which is no complaint)."""
    waits = [asyncio.create_task(link.wait_connected(timeout_s)), asyncio.create_task(stop.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    return link.connected or stop.is_set()


def _obey(welcome: Welcome, service: GenerationService, block_size: int) -> None:
    """The agent says how long chunks are: prefill and transfer must cut alike on all nodes."""
    if welcome.chunk_tokens < block_size:
        log.error("the agent's %s: ours stays", no_chunk(welcome.chunk_tokens, block_size))
    else:
        service.model.set_chunk_tokens(welcome.chunk_tokens - welcome.chunk_tokens % block_size)
    # An agent that has just started has nothing to drain.
    service.resume()


def _load(args: argparse.Namespace) -> LoadedModel:
    """Raises EngineError."""
    if args.chunk_tokens < args.block_size:
        raise ModelError(no_chunk(args.chunk_tokens, args.block_size))
    if args.emulate is not None:
        return _load_emulated(args)
    if args.model is None:
        raise ModelError("--model DIR is needed (or --emulate ARCH)")
    tokenizer = TextTokenizer.load(args.model)
    return LoadedModel(_load_engine(args), tokenizer, args.model_name or args.model.resolve().name)


def _load_engine(args: argparse.Namespace) -> Engine:
    """Raises ModelError."""
    options: dict[str, Any] = {
        "block_size": args.block_size,
        "max_model_len": args.max_model_len,
        "threads": args.threads,
        "revision": args.model_revision,
        "digests": default_memory(),
    }
    if args.stages > 1:
        return StagedEngine.load_directory(args.model, stages=args.stages, **options)
    # torch and transformers take seconds to import: only now, when they are needed for sure.
    from engine.torch.embedded import EmbeddedEngine

    return EmbeddedEngine.load_directory(args.model, **options)


def _load_emulated(args: argparse.Namespace) -> LoadedModel:
    if args.emulate.endswith(".json"):
        return _load_stand_in(read_stand_in(Path(args.emulate)), args)
    arch, directory = _emulated_model(args.emulate)
    directory = args.model or directory
    times = EmulatedTimes(args.prefill_base_s, args.prefill_per_token_s, args.decode_step_s)
    tokenizer = byte_text() if directory is None else TextTokenizer.load(directory)
    engine = EmulatedEngine(
        emulated_layout(arch, args.block_size),
        time.sleep,
        times,
        max_model_len=args.max_model_len or 32768,
        vocab_size=tokenizer.vocab_size,
    )
    name = args.model_name or f"emulated-{arch}"
    if args.stages == 1:
        return LoadedModel(engine, tokenizer, name)
    if args.prefill_base_s:
        raise ModelError(
            "--prefill-base-s is the time per chunk of one machine: with --stages give --prefill-per-token-s alone"
        )
    return LoadedModel(
        engine, tokenizer, name, constant(name, args.prefill_per_token_s, args.decode_step_s, args.max_running)
    )


def _load_stand_in(stand_in: StandIn, args: argparse.Namespace) -> LoadedModel:
    tokenizer = byte_text()
    engine = EmulatedEngine(
        stand_in.layout(args.block_size),
        time.sleep,
        max_model_len=args.max_model_len or 32768,
        vocab_size=tokenizer.vocab_size,
    )
    return LoadedModel(engine, tokenizer, args.model_name or stand_in.model, stand_in)


def _emulated_model(model: str) -> tuple[str, Path | None]:
    """The model that `--emulate` names: an architecture, or a directory, whose architecture and tokenizer it takes."""
    if model in GROUPS:
        return model, None
    directory = Path(model)
    if not directory.is_dir():
        raise ModelError(f"--emulate {model}: neither a directory nor one of {', '.join(GROUPS)}")
    kind = model_type(directory)
    found = [arch for arch, recipe in RECIPES.items() if recipe["model_type"] == kind and arch in GROUPS]
    if not found:
        raise ModelError(f"{directory} is a {kind}, which cannot be emulated; choose one of {', '.join(GROUPS)}")
    return found[0], directory


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        description="Run one engine: a model behind an OpenAI-compatible HTTP port, connected to its node's agent.",
        epilog="Example: python -m engine --model models/kimi_linear --port 8001. Without --agent-socket it serves alone.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="directory of a transformers model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port, 0 for any free one (default: %(default)s)")
    parser.add_argument("--agent-socket", type=Path, metavar="PATH", help="Unix socket of the node's agent")
    parser.add_argument(
        "--agent-timeout-s",
        type=float,
        default=AGENT_TIMEOUT_S,
        metavar="S",
        help="seconds to wait for the agent's first answer (default: %(default)s)",
    )
    parser.add_argument(
        "--model-revision",
        default="",
        metavar="NAME",
        help="name of the weights' contents (default: their hash)",
    )
    parser.add_argument("--model-name", metavar="NAME", help="the model's name in the API (default: the directory's)")
    parser.add_argument(
        "--max-model-len", type=_positive, metavar="TOKENS", help="context length (default: the model's)"
    )
    parser.add_argument(
        "--block-size",
        type=_positive,
        default=DEFAULT_BLOCK_SIZE,
        metavar="TOKENS",
        help="tokens of a block (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk-tokens",
        type=_positive,
        default=DEFAULT_CHUNK_TOKENS,
        metavar="TOKENS",
        help="tokens of a prefill chunk; an agent's value wins (default: %(default)s)",
    )
    parser.add_argument("--threads", type=_positive, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument(
        "--stages",
        type=_positive,
        default=1,
        metavar="N",
        help="processes that share the layers (experimental); emulated: machines (default: %(default)s)",
    )
    parser.add_argument(
        "--max-running",
        type=_positive,
        default=MAX_RUNNING,
        metavar="N",
        help="sequences computed at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-requests",
        type=_positive,
        default=MAX_REQUESTS,
        metavar="N",
        help="requests at once; more get a 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=_positive,
        default=MAX_BODY_BYTES,
        metavar="BYTES",
        help="longest body of a request (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="S",
        help="seconds for running requests to end at SIGTERM (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="least level of log lines (default: %(default)s)",
    )
    emulation = parser.add_argument_group("emulation: no model, invented tokens (see engine.emulated.emulated)")
    emulation.add_argument(
        "--emulate",
        metavar="ARCH",
        help=f"one of {', '.join(GROUPS)}, the directory of a model of one of them, or a .json file (engine.emulated.standin)",
    )
    emulation.add_argument(
        "--prefill-base-s", type=float, default=0.0, metavar="S", help="seconds per prefill chunk (default: 0)"
    )
    emulation.add_argument(
        "--prefill-per-token-s", type=float, default=0.0, metavar="S", help="seconds per prefilled token (default: 0)"
    )
    emulation.add_argument(
        "--decode-step-s", type=float, default=0.0, metavar="S", help="seconds per decode step (default: 0)"
    )
    return parser


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be in [0, 65535], not {value}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
