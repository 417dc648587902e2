"""Time to first token of two vLLM servers, one prefilling for the other: our connector and gateway, and the NixlConnector.

    .venv-vllm/bin/python -m benchmarks.vllm_pd [--json] [--wan [--rate-mbit 500 --rtt-ms 40]] [--in-turn]

Same model, same flags, same prompts, all servers on this machine, taking turns: while one pair is asked the processes of the
other are stopped. That takes 11 GB; with `--in-turn` one pair is measured and ended before the other starts.

Ours is asked through our gateway, NIXL as its proxies do it (prefill server, then decode server with the parameters of the
answer). NIXL moves KVCache by UCX over TCP, we by our own TCP. `overlap` is the share of a transfer's bytes that had been sent
when prefill ended; a pull that begins after the prefill's answer has none. `ratio` is the median over rounds of our time
over theirs for the same prompt. Prompts are random tokens, so nothing is cached.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import End
from benchmarks.wanem import ADDRESSES, Wan, why_not
from engine.models import build_model
from engine.vllm_launch import ServerOptions, environment, installed_version, server_command
from node.supervisor import die_with_parent
from prfaas.toml import dump_toml
from tests.e2e.harness import free_port

NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prfaas-peers" / "vllm-nixl"
LENGTHS = (128, 512, 1024, 2048, 4000)
MAX_TOKENS = 8
MAX_MODEL_LEN = 4096
CHUNK = 512
VOCABULARY = range(4, 512)
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "256")  # not all of the GiB that a server would take
START_S = 900.0
STOP_S = 60.0


class Child:
    """A server. What it logs goes to a file, and without `talks` so does its standard output."""

    def __init__(
        self, argv: Sequence[str], log: Path, env: dict[str, str] | None = None, *, talks: bool = True
    ) -> None:
        self._log = log
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else log.open("w"),
            stderr=log.open("a"),
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR", **(env or {})},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def says(self, prefix: str) -> dict[str, str]:
        """The `key=value` words of its first line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(prefix):
                return dict(word.split("=", 1) for word in line.split() if "=" in word)
        raise RuntimeError(f"{self._log}: {self._log.read_text()[-2000:]}")

    def signal(self, number: signal.Signals) -> None:
        """To it and all its descendants."""
        for pid in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGCONT)  # a stopped process does not hear that it is to end
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Pair:
    """A prefill and a decode server and what stands before them."""

    def __init__(self, name: str, ask: dict[str, Any], children: Sequence[Child]) -> None:
        self.name = name
        self.ask = ask
        self._children = children

    def signal(self, number: signal.Signals) -> None:
        for child in self._children:
            child.signal(number)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for each in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


class Place:
    """Where the two servers run: one host, or the two ends of a link."""

    def __init__(self, wan: Wan | None) -> None:
        self._wan = wan

    def host(self, side: str) -> str:
        return ADDRESSES[side] if self._wan else "127.0.0.1"

    def command(self, side: str, argv: list[str]) -> list[str]:
        return self._wan.command(side, argv) if self._wan else argv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="llama", help="of engine.models; the model is tiny and runs in fp32")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wan", action="store_true", help="an emulated link between the two servers; needs root")
    parser.add_argument("--rate-mbit", type=float, default=500.0)
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    parser.add_argument("--in-turn", action="store_true", help="one pair after the other, which takes half the memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit("benchmarks.vllm_pd: needs vLLM: run it with .venv-vllm/bin/python, which `make test-vllm` sets up")
    if args.wan and (reason := why_not()) is not None:
        sys.exit(f"benchmarks.vllm_pd: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    install_nixl()
    with contextlib.ExitStack() as stack:
        wan = stack.enter_context(Wan(rate_mbit=args.rate_mbit, rtt_ms=args.rtt_ms)) if args.wan else None
        report = run(args, Place(wan), stack)
    print(json.dumps(report, indent=2) if args.json else table(report))


def run(args: argparse.Namespace, place: Place, stack: contextlib.ExitStack) -> dict[str, Any]:
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-pd-")))
    model = scratch / "model"
    build_model(args.arch, model, report=lambda line: None)
    client = End(place.command("b", [sys.executable, "-m", "benchmarks.vllm_client"]))
    stack.callback(client.close)
    seed = time.monotonic_ns()
    results: dict[int, list[dict[str, dict[str, Any]]]] = {length: [] for length in args.lengths}
    for makers in [[our_pair], [nixl_pair]] if args.in_turn else [[our_pair, nixl_pair]]:
        with contextlib.ExitStack() as turn:
            pairs = [make(model, scratch, place, client, turn) for make in makers]
            for pair in pairs:
                pair.signal(signal.SIGSTOP)
            for length, rounds in measured(pairs, client, args, np.random.default_rng(seed)).items():
                known = results[length] or [{} for _ in rounds]
                results[length] = [before | each for before, each in zip(known, rounds, strict=True)]
    return {
        "vllm": installed_version(),
        "arch": args.arch,
        "link": {"rate_mbit": args.rate_mbit, "rtt_ms": args.rtt_ms} if args.wan else None,
        "rounds": args.rounds,
        "in_turn": args.in_turn,
        "load_average": os.getloadavg()[0],
        "lengths": {length: summary(rounds) for length, rounds in results.items()},
    }


def measured(
    pairs: Sequence[Pair], client: End, args: argparse.Namespace, rng: np.random.Generator
) -> dict[int, list[dict[str, dict[str, Any]]]]:
    """Results by length and round; the first round of each length, which opens connections, does not count."""
    return {
        length: [measure(pairs, client, length, rng, number) for number in range(args.rounds + 1)][1:]
        for length in args.lengths
    }


def measure(
    pairs: Sequence[Pair], client: End, length: int, rng: np.random.Generator, number: int
) -> dict[str, dict[str, Any]]:
    """One prompt through every pair, the order changing from round to round."""
    prompt = [int(token) for token in rng.integers(VOCABULARY.start, VOCABULARY.stop, length)]
    results = {}
    for pair in pairs if number % 2 else list(reversed(pairs)):
        pair.signal(signal.SIGCONT)
        client.ask(do="wait", url=pair.ask["url"], nodes=2 if pair.name == "ours" else 0)
        results[pair.name] = client.ask(do=pair.name, prompt=prompt, max_tokens=MAX_TOKENS, **pair.ask)
        pair.signal(signal.SIGSTOP)
    return results


def summary(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    ours = [each["ours"] for each in rounds]
    result: dict[str, Any] = {
        "ours_ttft_s": statistics.median(each["ttft_s"] for each in ours),
        "ours_overlap": statistics.median(each["overlap"] or 0.0 for each in ours),
        "bytes": ours[0]["bytes"],
        "fallbacks": sorted({reason for each in ours for reason in each["fallbacks"]}),
    }
    nixl = [each["nixl"] for each in rounds]
    ratios = [mine["ttft_s"] / theirs["ttft_s"] for mine, theirs in zip(ours, nixl, strict=True)]
    result |= {
        "nixl_ttft_s": statistics.median(each["ttft_s"] for each in nixl),
        "nixl_overlap": 0.0,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "equal_tokens": sum(mine["token_ids"] == theirs["token_ids"] for mine, theirs in zip(ours, nixl, strict=True)),
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}


def our_pair(model: Path, scratch: Path, place: Place, client: End, stack: contextlib.ExitStack) -> Pair:
    nodes = []
    for side, kind, role in (("a", "prfaas", "prefill"), ("b", "pd", "decode")):
        node = {
            "node_id": role,
            "cluster": kind,
            "cluster_kind": kind,
            "role": role,
            "engine": "vllm",
            "engine_args": list(FLAGS),
            "model": str(model),
            "served_model": "m",
            "host": place.host(side),
            "transport": "tcp",
            "chunk_tokens": CHUNK,
            "max_model_len": MAX_MODEL_LEN,
            "run_dir": str(scratch),
        }
        path = scratch / f"{role}.toml"
        path.write_text(dump_toml({"node": node}))
        argv = place.command(side, [sys.executable, "-m", f"{kind}_cluster", "-c", str(path)])
        nodes.append(started(Child(argv, scratch / f"{role}.log"), stack))
    agents = [{"agent": node.says("node listening ")["agent"]} for node in nodes]
    for node in nodes:
        node.says("node ready ")
    table = {"host": place.host("b"), "port": 0, "threshold_tokens": 1, "tokenizer_dir": str(model), "nodes": agents}
    path = scratch / "gateway.toml"
    path.write_text(dump_toml({"gateway": table}))
    argv = place.command("b", [sys.executable, "-m", "gateway", "-c", str(path)])
    gateway = started(Child(argv, scratch / "gateway.log"), stack)
    url = gateway.says("gateway ready ")["url"]
    client.ask(do="wait", url=url, nodes=2)
    return Pair("ours", {"url": url}, [*nodes, gateway])


def nixl_pair(model: Path, scratch: Path, place: Place, client: End, stack: contextlib.ExitStack) -> Pair:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    servers, urls = [], []
    for side in ("a", "b"):
        host, port = place.host(side), free_port()
        options = ServerOptions(
            model=str(model),
            served_name="m",
            host=host,
            port=port,
            agent_socket=Path("unused"),
            chunk_tokens=CHUNK,
            threads=1,
            drain_timeout_s=1.0,
            max_model_len=MAX_MODEL_LEN,
            vllm_flags=FLAGS,
        )
        flags = without(server_command(options, is_cpu=True), "--kv-transfer-config", "--kv-events-config")
        env = environment(options, os.environ, is_cpu=True) | {
            "PYTHONPATH": str(HOME),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "UCX_TLS": "tcp",
            "VLLM_HOST_IP": host,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        argv = place.command(side, [sys.executable, *flags, "--kv-transfer-config", json.dumps(transfer)])
        servers.append(started(Child(argv, scratch / f"nixl-{side}.log", env, talks=False), stack))
        urls.append(f"http://{host}:{port}")
    for url in urls:
        client.ask(do="wait", url=url)
    return Pair("nixl", {"prefill_url": urls[0], "url": urls[1]}, servers)


def started(child: Child, stack: contextlib.ExitStack) -> Child:
    stack.callback(child.stop)
    return child


def without(argv: Sequence[str], *flags: str) -> Iterator[str]:
    """`argv` without these flags and their values."""
    words = iter(argv)
    for word in words:
        if word in flags:
            next(words)
        else:
            yield word


def install_nixl() -> None:
    if not HOME.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(HOME), *NIXL]
        subprocess.run(command, check=True, stdout=sys.stderr)


def table(report: dict[str, Any]) -> str:
    lines = ["prompt tokens   ours TTFT   NIXL TTFT   ratio (min-max)        our overlap   KVCache   equal tokens"]
    for length, row in report["lengths"].items():
        theirs = f"{row['nixl_ttft_s']:9.3f} s   {row['ratio']:5.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        lines.append(
            f"{length:13}   {row['ours_ttft_s']:7.3f} s   {theirs:33}   {row['ours_overlap']:11.2f}   "
            f"{row['bytes'] / 1e6:5.1f} MB   {row['equal_tokens']}/{report['rounds']}"
        )
    return "\n".join([*lines, f"vLLM {report['vllm']}, load average {report['load_average']:.1f}"])


if __name__ == "__main__":
    main()
