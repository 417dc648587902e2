"""Time to first token of two vLLM servers, one prefilling for the other: our connector and gateway, and the NixlConnector.

    .venv-vllm/bin/python -m benchmarks.vllm.pd [--json] [--wan [--rate-mbit 500 --rtt-ms 40]] [--in-turn]

Same model, same flags, same prompts, all servers on this machine, taking turns: while one pair is asked the processes of the
other are stopped. That takes 11 GB; with `--in-turn` one pair is measured and ended before the other starts.

Ours is asked through our gateway, NIXL as its proxies do it (prefill server, then decode server with the parameters of
the answer). NIXL moves KVCache by UCX over TCP, we by our own TCP. `overlap` is the share of a transfer's bytes that
had been sent when prefill ended; a pull that begins after the prefill's answer has none. `ratio` is the median over
rounds of our time over theirs for the same prompt. Prompts are random tokens, so nothing is cached. `idle_cores` is
what a pair takes of the processors while it has no request.

What is measured goes to standard error at once, a JSON line per prompt; a pair that fails is left out of what remains.
"""

import argparse
import contextlib
import json
import math
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
import tomli_w

from benchmarks.lib.processes import GreetingChild
from benchmarks.lib.wanem import ADDRESSES, Wan, why_not
from engine.torch.tiny import build_model
from engine.vllm.launch import VllmOptions, environment, installed_version, server_command
from node.process.children import ending_with_us
from tests.transport.path.ports import free_port

NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prfaas-peers" / "vllm-nixl"
LENGTHS = (128, 512, 1024, 2048, 4000)
MAX_TOKENS = 8
MAX_MODEL_LEN = 4096
CHUNK = 512
VOCABULARY = range(4, 512)
FLAGS = ("--dtype", "float32", "--num-gpu-blocks-override", "256")  # not all of the GiB that a server would take
START_S = 900.0
LOOK_S = 5.0
STOP_S = 60.0
SETTLE_S = 1.0
IDLE_S = 3.0

Round = dict[str, dict[str, Any]]  # a prompt's results by pair
Results = dict[int, list[Round]]  # by prompt length


class ServerProcess:
    """A server. What it logs goes to a file, and without `talks` so does its standard output."""

    def __init__(
        self, argv: Sequence[str], log: Path, env: dict[str, str] | None = None, *, talks: bool = True
    ) -> None:
        self._log = log
        self.process = subprocess.Popen(
            ending_with_us(argv, signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else log.open("w"),
            stderr=log.open("a"),
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR", **(env or {})},
            start_new_session=True,
        )

    def says(self, prefix: str) -> dict[str, str]:
        """The `key=value` words of its first line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(prefix):
                return dict(word.split("=", 1) for word in line.split() if "=" in word)
        raise RuntimeError(f"{self._log}: {self._log.read_text()[-2000:]}")

    def raise_if_ended(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"ended with {self.process.returncode}: {self._log.read_text()[-2000:]}")

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


class ServerPair:
    """A prefill and a decode server and what stands before them."""

    failure = ""  # why it is asked no more

    def __init__(self, name: str, ask: dict[str, Any], children: Sequence[ServerProcess]) -> None:
        self.name = name
        self.ask = ask
        self._children = children

    def signal(self, number: signal.Signals) -> None:
        for child in self._children:
            child.signal(number)

    def cpu_s(self) -> float:
        """Processor seconds that its processes have used so far."""
        return sum(cpu_s(pid) for child in self._children for pid in family(child.process.pid))


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for each in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


class PairPlacement:
    """Where the two servers run: one host, or the two ends of a link."""

    def __init__(self, wan: Wan | None) -> None:
        self._wan = wan

    def host(self, side: str) -> str:
        return ADDRESSES[side] if self._wan else "127.0.0.1"

    def command(self, side: str, argv: list[str]) -> list[str]:
        return self._wan.command(side, argv) if self._wan else argv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="llama", help="of engine.torch.tiny; the model is tiny and runs in fp32")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wan", action="store_true", help="an emulated link between the two servers; needs root")
    parser.add_argument("--rate-mbit", type=float, default=500.0)
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    parser.add_argument("--in-turn", action="store_true", help="one pair after the other, which takes half the memory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if find_spec("vllm") is None:
        sys.exit("benchmarks.vllm.pd: needs vLLM: run it with .venv-vllm/bin/python, which `make test-vllm` sets up")
    if args.wan and (reason := why_not()) is not None:
        sys.exit(f"benchmarks.vllm.pd: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    install_nixl()
    with contextlib.ExitStack() as stack:
        wan = stack.enter_context(Wan(rate_mbit=args.rate_mbit, rtt_ms=args.rtt_ms)) if args.wan else None
        report = run(args, PairPlacement(wan), stack)
    print(json.dumps(report, indent=2) if args.json else table(report))


def run(args: argparse.Namespace, place: PairPlacement, stack: contextlib.ExitStack) -> dict[str, Any]:
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-pd-")))
    model = scratch / "model"
    build_model(args.arch, model, report=lambda line: None)
    client = GreetingChild(place.command("b", [sys.executable, "-m", "benchmarks.vllm.client"]))
    stack.callback(client.close)
    seed = time.monotonic_ns()
    results: Results = {length: [{} for _ in range(args.rounds)] for length in args.lengths}
    idle_cores: dict[str, float] = {}
    failures: dict[str, str] = {}
    for names in [["ours"], ["nixl"]] if args.in_turn else [["ours", "nixl"]]:
        with contextlib.ExitStack() as turn:
            pairs = []
            for name in names:
                note(starting=name)
                try:
                    with contextlib.ExitStack() as starting:  # what fails to start does not run beside the other
                        pair = PAIRS[name](model, scratch, place, client, starting)
                        idle_cores[name] = idle(pair)
                        pair.signal(signal.SIGSTOP)
                        turn.push(starting.pop_all())
                except (RuntimeError, OSError) as exc:
                    failures[name] = str(exc)
                    note(failed=name, why=str(exc))
                else:
                    pairs.append(pair)
            measure_all(pairs, client, args, np.random.default_rng(seed), results)
            failures |= {pair.name: pair.failure for pair in pairs if pair.failure}
    return {
        "vllm": installed_version(),
        "arch": args.arch,
        "link": {"rate_mbit": args.rate_mbit, "rtt_ms": args.rtt_ms} if args.wan else None,
        "rounds": args.rounds,
        "in_turn": args.in_turn,
        "load_average": os.getloadavg()[0],
        "idle_cores": idle_cores,
        "failures": failures,
        "lengths": {length: summary(rounds) for length, rounds in results.items()},
    }


def idle(pair: ServerPair) -> float:
    """Cores that its processes keep busy while it has nothing to do."""
    time.sleep(SETTLE_S)
    before_s, started_s = pair.cpu_s(), time.monotonic()
    time.sleep(IDLE_S)
    return round((pair.cpu_s() - before_s) / (time.monotonic() - started_s), 3)


def measure_all(
    pairs: Sequence[ServerPair],
    client: GreetingChild,
    args: argparse.Namespace,
    rng: np.random.Generator,
    results: Results,
) -> None:
    """Fills in results by length and round; a round before each length's first, which opens connections, does not count."""
    for length in args.lengths:
        for number in range(-1, args.rounds):
            measured = measure([pair for pair in pairs if not pair.failure], client, length, rng, number)
            if number >= 0:
                results[length][number] |= measured


def measure(
    pairs: Sequence[ServerPair], client: GreetingChild, length: int, rng: np.random.Generator, number: int
) -> Round:
    """One prompt through every pair, the order changing from round to round."""
    prompt = [int(token) for token in rng.integers(VOCABULARY.start, VOCABULARY.stop, length)]
    results = {}
    for pair in pairs if number % 2 else list(reversed(pairs)):
        pair.signal(signal.SIGCONT)
        try:
            asked(client, do="wait", url=pair.ask["url"], nodes=2 if pair.name == "ours" else 0)
            time.sleep(SETTLE_S)  # timers that ran out while it was stopped
            before_s = pair.cpu_s()
            result = asked(client, do=pair.name, prompt=prompt, max_tokens=MAX_TOKENS, **pair.ask)
        except RuntimeError as exc:
            pair.failure = str(exc)
            note(failed=pair.name, why=pair.failure)
        else:
            results[pair.name] = result | {"cpu_s": pair.cpu_s() - before_s}
            note(pair=pair.name, length=length, round=number, **results[pair.name])
        pair.signal(signal.SIGSTOP)
    return results


def asked(client: GreetingChild, **request: Any) -> dict[str, Any]:
    """The client's answer. Raises RuntimeError when it got none."""
    answer = client.ask(**request)
    if "error" in answer:
        raise RuntimeError(f"{request['do']}: {answer['error']}")
    return answer


def wait_for(server: ServerProcess, client: GreetingChild, url: str) -> None:
    """Until it is well. Raises RuntimeError when it ends before, or takes too long."""
    deadline_s = time.monotonic() + START_S
    while "error" in client.ask(do="wait", url=url, timeout_s=LOOK_S):
        server.raise_if_ended()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{url} is not ready after {START_S:.0f} s")


def note(**words: Any) -> None:
    """What has happened so far is not lost with what comes after."""
    print(json.dumps(words), file=sys.stderr, flush=True)


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    ours = [each["ours"] for each in rounds if "ours" in each]
    nixl = [each["nixl"] for each in rounds if "nixl" in each]
    both = [(each["ours"], each["nixl"]) for each in rounds if "ours" in each and "nixl" in each]
    result: dict[str, Any] = {}
    for name, answers in (("ours", ours), ("nixl", nixl)):
        if answers:
            result[f"{name}_ttft_s"] = statistics.median(each["ttft_s"] for each in answers)
            result[f"{name}_overlap"] = statistics.median(each["overlap"] or 0.0 for each in answers)
            result[f"{name}_cpu_s"] = statistics.median(each["cpu_s"] for each in answers)
    if ours:
        result["bytes"] = ours[0]["bytes"]
        result["fallbacks"] = sorted({reason for each in ours for reason in each["fallbacks"]})
    if both:
        ratios = [mine["ttft_s"] / theirs["ttft_s"] for mine, theirs in both]
        result |= {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        result["equal_tokens"] = sum(mine["token_ids"] == theirs["token_ids"] for mine, theirs in both)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}


def our_pair(
    model: Path, scratch: Path, place: PairPlacement, client: GreetingChild, stack: contextlib.ExitStack
) -> ServerPair:
    nodes = []
    for side, kind, role in (("a", "prfaas", "prefill"), ("b", "pd", "decode")):
        config = {
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
        path.write_text(tomli_w.dumps({"node": config}))
        argv = place.command(side, [sys.executable, "-m", f"{kind}_cluster", "-c", str(path)])
        nodes.append(started(ServerProcess(argv, scratch / f"{role}.log"), stack))
    agents = [{"agent": node.says("node listening ")["agent"]} for node in nodes]
    for node in nodes:
        node.says("node ready ")
    table = {"host": place.host("b"), "port": 0, "threshold_tokens": 1, "tokenizer_dir": str(model), "nodes": agents}
    path = scratch / "gateway.toml"
    path.write_text(tomli_w.dumps({"gateway": table}))
    argv = place.command("b", [sys.executable, "-m", "gateway", "-c", str(path)])
    gateway = started(ServerProcess(argv, scratch / "gateway.log"), stack)
    url = gateway.says("gateway ready ")["url"]
    asked(client, do="wait", url=url, nodes=2)
    return ServerPair("ours", {"url": url}, [*nodes, gateway])


def nixl_pair(
    model: Path, scratch: Path, place: PairPlacement, client: GreetingChild, stack: contextlib.ExitStack
) -> ServerPair:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    servers, urls = [], []
    for side in ("a", "b"):
        host, port = place.host(side), free_port()
        options = VllmOptions(
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
        servers.append(started(ServerProcess(argv, scratch / f"nixl-{side}.log", env, talks=False), stack))
        urls.append(f"http://{host}:{port}")
    for server, url in zip(servers, urls, strict=True):
        wait_for(server, client, url)
    return ServerPair("nixl", {"prefill_url": urls[0], "url": urls[1]}, servers)


PAIRS = {"ours": our_pair, "nixl": nixl_pair}


def started(child: ServerProcess, stack: contextlib.ExitStack) -> ServerProcess:
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
    lines = ["prompt tokens   ours TTFT   NIXL TTFT   ratio (min-max)     our overlap   KVCache   equal tokens"]
    for length, row in report["lengths"].items():
        spread = f"{row['ratio']:5.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})" if "ratio" in row else ""
        lines.append(
            f"{length:13}   {row.get('ours_ttft_s', math.nan):7.3f} s   {row.get('nixl_ttft_s', math.nan):7.3f} s   "
            f"{spread:17}   {row.get('ours_overlap', math.nan):11.2f}   {row.get('bytes', 0) / 1e6:5.1f} MB   "
            f"{row.get('equal_tokens', 0)}/{report['rounds']}"
        )
    lines += [f"{name} idle: {cores:.2f} cores" for name, cores in report["idle_cores"].items()]
    lines += [f"{name} FAILED: {why}" for name, why in report["failures"].items()]
    return "\n".join([*lines, f"vLLM {report['vllm']}, load average {report['load_average']:.1f}"])


if __name__ == "__main__":
    main()
