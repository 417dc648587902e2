"""`python -m engine.sglang.launch`: becomes an SGLang server whose requests' KVCache goes through this node's agent.

Takes the arguments that `python -m engine.vllm.launch` takes, the node's role and its bootstrap port; what comes after `--` is
SGLang's. The process is replaced by SGLang's own, so that its starter signals and waits for the server itself.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.sglang.plugin import BACKEND
from engine.sglang.servable import NotServable, complaint_about_flags, config_of, context_of
from engine.sglang.settings import REVISION, SOCKET
from engine.sglang.version import is_tested, untested
from transport.control.last_words import CANNOT_SERVE
from transport.control.python_command import SAFE_PATH, SAFE_PATH_VARIABLE
from transport.path.tcp import free_port

ROLES: Final = ("prefill", "decode")
PAGE_TOKENS: Final = 64  # pages are blocks here; SGLang's own default of 1 is a message and a name for every token
EVENTS_SOCKET: Final = "kv-events"  # beside the agent's own, which listens there
EXIT_USAGE: Final = 2

Become = Callable[[str, list[str], dict[str, str]], object]  # as os.execve, which does not return


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """What the node says about its server; `sglang_flags` are passed on as they are."""

    model: str
    served_name: str
    role: str
    host: str
    port: int
    bootstrap_port: int
    agent_socket: Path
    chunk_tokens: int
    block_size: int
    max_model_len: int
    model_revision: str = ""
    sglang_flags: tuple[str, ...] = ()


def installed_version() -> str | None:
    """The version of the SGLang that this Python would import, None if it would not."""
    if importlib.util.find_spec("sglang") is None:
        return None
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def main(
    argv: Sequence[str] | None = None,
    *,
    version_of: Callable[[], str | None] = installed_version,
    become: Become = os.execve,
) -> int:
    """Replaces this process by the server; returns only if it cannot."""
    own, rest = _split(list(sys.argv[1:] if argv is None else argv))
    parsed = _parser().parse_args(own)
    if (complaint := complaint_about_flags(rest)) is not None:
        return _refuse(complaint)
    try:
        config = config_of(parsed.model)
    except NotServable as reason:
        return _refuse(str(reason))
    longest = parsed.max_model_len or context_of(config)
    if longest is None:
        return _refuse("max_model_len is missing, and config.json does not say which prompts the model takes")
    if parsed.chunk_tokens < parsed.block_size:  # SGLang cuts at pages, and would never begin
        return _refuse(f"chunk_tokens = {parsed.chunk_tokens}: less than a page, block_size = {parsed.block_size}")
    if ":" in (parsed.model_name or ""):
        return _refuse(f"served_model {parsed.model_name!r}: what follows a colon is an adapter's name to SGLang")
    version = version_of()
    if version is None:
        return _refuse("SGLang is not installed here: see docs/guides/sglang.md")
    if not is_tested(version):
        print(f"engine: {untested(version)}", file=sys.stderr)
    options = _options(parsed, longest, rest)
    sys.stderr.flush()
    become(sys.executable, [sys.executable, *server_command(options)], environment(options, os.environ))
    return 0


def server_command(options: SglangOptions) -> list[str]:
    """The arguments for a Python that becomes the server. SGLang's flags come last: where one is given twice, it wins."""
    # Not `sglang serve`: a script, which belongs to another Python where that environment is a copy.
    command = [SAFE_PATH, "-m", "sglang.launch_server", "--model-path", options.model]
    command += ["--served-model-name", options.served_name, "--host", options.host, "--port", str(options.port)]
    command += ["--disaggregation-mode", options.role, "--disaggregation-transfer-backend", BACKEND]
    if options.role == "prefill":
        command += ["--disaggregation-bootstrap-port", str(options.bootstrap_port)]
        command += ["--kv-events-config", json.dumps(_kv_events(options))]
    command += ["--page-size", str(options.block_size), "--context-length", str(options.max_model_len)]
    command += ["--chunked-prefill-size", str(options.chunk_tokens)]
    command += ["--enable-cache-report"]  # `usage` says how much was cached, which the gateway learns from
    command += ["--log-level-http", "warning"]  # else a line for each of the agent's looks
    return [*command, *options.sglang_flags]


def environment(options: SglangOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    """The server's environment; what the operator has set wins, but for where its agent is."""
    # `/health` would have the model generate a token: a long chunk must not look like a server that is gone
    # (`node.engine.liveness`).
    wanted = {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SGLANG_HOST_IP": options.host,
        SAFE_PATH_VARIABLE: "1",
    }
    ours = {SOCKET: str(options.agent_socket), REVISION: options.model_revision}
    return {**wanted, **inherited, **ours}


def _kv_events(options: SglangOptions) -> dict[str, object]:
    # In Dynamo's format hashes of blocks differ by the salt of their requests, in SGLang's own they do not.
    endpoint = f"ipc://{options.agent_socket.parent / EVENTS_SOCKET}"
    return {"publisher": "zmq", "endpoint": endpoint, "topic": "", "format": "dynamo"}


def _refuse(complaint: str) -> int:
    print(f"{CANNOT_SERVE}{complaint}", file=sys.stderr)
    return EXIT_USAGE


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and what comes after `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _options(parsed: argparse.Namespace, max_model_len: int, sglang_flags: Sequence[str]) -> SglangOptions:
    return SglangOptions(
        model=parsed.model,
        served_name=parsed.model_name or Path(parsed.model).name,
        role=parsed.role,
        host=parsed.host,
        port=parsed.port or free_port(parsed.host),
        bootstrap_port=parsed.bootstrap_port or free_port(parsed.host),
        agent_socket=parsed.agent_socket,
        chunk_tokens=parsed.chunk_tokens,
        block_size=parsed.block_size,
        max_model_len=max_model_len,
        model_revision=parsed.model_revision,
        sglang_flags=tuple(sglang_flags),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.sglang.launch", description="An SGLang server as the engine of a node."
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="a model directory")
    parser.add_argument("--role", required=True, choices=ROLES)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, picks a free one")
    parser.add_argument("--bootstrap-port", type=int, default=0, help="of one that prefills; 0 picks a free one")
    parser.add_argument("--agent-socket", type=Path, required=True, metavar="PATH")
    parser.add_argument("--model-name", help="name in the API (default: the directory's)")
    parser.add_argument("--model-revision", default="", metavar="NAME", help="instead of a digest of the weights")
    parser.add_argument("--max-model-len", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--block-size", type=int, default=PAGE_TOKENS, metavar="TOKENS", help="of a page (default: 64)")
    parser.add_argument("--chunk-tokens", type=int, default=2048, metavar="TOKENS", help="chunked_prefill_size")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch, on a CPU: by OMP_NUM_THREADS, which the node sets"
    )
    parser.add_argument(
        "--drain-timeout-s", type=float, default=60.0, metavar="S", help="SGLang drains for as long as it is let"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
