"""CPU per request of the gateway, beside a bare proxy and (--peers) vllm-router and Dynamo's frontend, in one run of turns.

Engines and client are C (http_ends.c). What is counted is the gateway's process and its children; engines, client and the
agents of ours are not. Ratios are medians of each round's ratio: on a shared machine nothing else says much.
"""

import argparse
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gateway.arms import CHECKOUT, GatewayArm, arms, built_ends
from benchmarks.lib import peers

WORDS = re.findall(
    r"\w+",
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into than "
    "them can only other new some could time these two may then do first any my now such like our over man me even most made "
    "after also did many before must through back years where much your way well down should because each just those people "
    "server request tokens return function value error index cache memory network transfer",
)
BASES = {
    "aiohttp": "aiohttp",
    "router": "vllm_router",
    "its PD": "vllm_router_pd",
    "Dynamo": "dynamo",
    "its fast": "dynamo_fastokens",
    "marked": "dynamo_marked",
    "unkept": "ours_unkept",
}
LAG = re.compile(r'prfaas_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)')


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """A client's requests in one round: `first` is not measured; `bodies` are, in turns until `requests` are
    answered."""

    bodies: Sequence[bytes]
    requests: int
    first: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class LoadScenario:
    """A load of its own for every round, by its number."""

    name: str
    connections: int
    load: Callable[[int], ClientLoad]


def text(size: int, seed: int) -> str:
    """Words, about `size` bytes of them."""
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=size // 5))


def source(size: int, seed: int) -> str:
    """Lines of this project's own files, about `size` bytes of them: many more different words than `text` has."""
    draw = random.Random(seed)
    paths = (path for pattern in ("*/*.py", "*/*/*.py", "*/*.md") for path in sorted(CHECKOUT.glob(pattern)))
    lines = [line for path in paths for line in path.read_text().splitlines() if line.strip()]
    mean = sum(map(len, lines)) / len(lines) + 1
    return "\n".join(draw.choices(lines, k=int(size / mean)))


def chat(*contents: str, **fields: Any) -> bytes:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return json.dumps(
        {"model": "mock", "messages": messages, "max_tokens": 1, **fields}, separators=(",", ":")
    ).encode()


def same(requests: int, body: bytes) -> Callable[[int], ClientLoad]:
    return lambda _: ClientLoad([body], requests, first=[body])


def new_prompts(requests: int, size: int, words: Callable[[int, int], str] = text) -> Callable[[int], ClientLoad]:
    return lambda number: ClientLoad([chat(words(size, 1000 * number + i)) for i in range(requests)], requests)


def next_turns(requests: int, size: int, new: int) -> Callable[[int], ClientLoad]:
    """An agent's conversation of `size` bytes, and turn after turn that adds `new` bytes to it."""

    def load(number: int) -> ClientLoad:
        said = [text(size // 160, 1_000_000 * number + i) for i in range(161)]
        turns = []
        for turn in range(requests + 1):
            turns.append(chat(*said))
            said += [text(new // 2, -1_000_000 * number - 2 * turn - i) for i in range(2)]
        return ClientLoad(turns[1:], requests, first=turns[:1])

    return load


def scenarios(scale: float) -> list[LoadScenario]:
    """The issue's table; `scale` times as many requests."""

    def n(requests: int) -> int:
        return max(4, int(requests * scale))

    hello = "Hello, how are you today?"
    stream = {"stream": True, "max_tokens": 200}
    return [
        LoadScenario("short, 1 connection", 1, same(n(1500), chat(hello))),
        LoadScenario("short, 16 connections", 16, same(n(2000), chat(hello))),
        LoadScenario("stream of 200, 16", 16, same(n(160), chat(hello, **stream))),
        LoadScenario("stream of 200, 100", 100, same(n(200), chat(hello, **stream))),
        LoadScenario("stream of 200 at 10 ms, 100", 100, same(n(100), chat(hello, **stream, seed=10))),
        LoadScenario("28 KB, seen", 4, same(n(200), chat(text(28_000, 1)))),
        LoadScenario("418 KB, seen", 1, same(n(30), chat(text(418_000, 1)))),
        LoadScenario("418 KB, new", 1, new_prompts(n(6), 418_000)),
        LoadScenario("418 KB of source, new", 1, new_prompts(n(6), 418_000, source)),
        LoadScenario("480 KB, agent's next turn", 1, next_turns(n(12), 480_000, 2_900)),
        LoadScenario("10 MB", 1, same(4, chat(text(9_900_000, 1)))),
    ]


@dataclass(slots=True)
class Figures:
    """The results of one arm's rounds in one scenario."""

    cpu_ms: list[float]
    p50_ms: list[float]
    lags: Counter[float] = field(default_factory=Counter)  # samples by upper bound in seconds; only ours tells

    @property
    def lag_s(self) -> float:
        """What 99 of 100 samples of the event loop's lag were below, in all rounds; of fewer samples, all."""
        return next((bound for bound in sorted(self.lags) if self.lags[bound] >= 0.99 * max(self.lags.values())), 0.0)

    def summary(self) -> dict[str, float]:
        return {
            "cpu_ms": statistics.median(self.cpu_ms),
            "cpu_ms_min": min(self.cpu_ms),
            "p50_ms": statistics.median(self.p50_ms),
            "lag_s": self.lag_s,
        }


class Bench:
    """Runs scenarios."""

    def __init__(self, ends: Path, arms: Sequence[GatewayArm], rounds: int) -> None:
        self._ends = ends
        self._arms = arms
        self._rounds = rounds

    def run(self, scenario: LoadScenario) -> dict[str, Figures]:
        figures: dict[str, Figures] = defaultdict(lambda: Figures([], []))
        taking_part = list(self._arms)
        for number in range(self._rounds):
            load = scenario.load(number)
            # Each round begins with another arm, so that no arm alone pays for the machine's warm-up.
            for arm in taking_part[number % len(taking_part) :] + taking_part[: number % len(taking_part)]:
                self._round(arm, scenario, load, figures[arm.name])
        return figures

    def _round(self, arm: GatewayArm, scenario: LoadScenario, load: ClientLoad, figures: Figures) -> None:
        if load.first:
            self._send(arm, 1, load.first, len(load.first))
        late, before_s = _lags(arm), arm.cpu_s()
        answer = self._send(arm, scenario.connections, load.bodies, load.requests)
        figures.cpu_ms.append((arm.cpu_s() - before_s) / load.requests * 1e3)
        figures.p50_ms.append(answer["p50_ms"])
        figures.lags.update(_lags(arm) - late)
        if answer["failed"]:
            raise RuntimeError(f"{arm.name}, {scenario.name}: {answer}")

    def _send(self, arm: GatewayArm, connections: int, bodies: Sequence[bytes], requests: int) -> dict[str, Any]:
        argv = [str(self._ends), "load", str(arm.port), str(connections), str(requests)]
        told = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
        ended = subprocess.run(argv, input=told, stdout=subprocess.PIPE, check=False)
        if ended.returncode:
            raise RuntimeError(f"{arm.name} did not answer all requests")
        answer: dict[str, Any] = json.loads(ended.stdout)
        return answer


def _lags(arm: GatewayArm) -> Counter[float]:
    """Samples of the event loop's lag so far, by upper bound in seconds; only ours tells."""
    if not arm.is_ours:
        return Counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{arm.port}/metrics", timeout=10) as page:
        return Counter({float(bound): int(float(count)) for bound, count in LAG.findall(page.read().decode())})


def ratios(figures: dict[str, Figures], base: str) -> dict[str, float]:
    """The CPU of each arm by that of `base`: the median of the rounds' ratios."""
    if base not in figures:
        return {}
    by = figures[base].cpu_ms
    return {
        name: statistics.median(one / max(other, 1e-6) for one, other in zip(each.cpu_ms, by, strict=True))
        for name, each in figures.items()
        if name != base
    }


def report(results: dict[str, dict[str, Figures]]) -> Iterator[str]:
    columns = "".join(
        f"{name:>10}" for name in ("CPU ms", "p50 ms", *(f"÷ {base}" for base in BASES), "÷ before", "lag p99")
    )
    yield f"{'':28}{'arm':16}{columns}"
    for scenario, figures in results.items():
        for arm, each in figures.items():
            before = arm.replace("ours", "before")
            by = [ratios(figures, base).get(arm) for base in (*BASES.values(), before)]
            shown = "".join(f"{ratio:10.2f}" if ratio is not None else " " * 10 for ratio in by)
            summary = each.summary()
            lag = f"{each.lag_s:9g}" if each.lag_s else ""
            yield f"{scenario:28}{arm:16}{summary['cpu_ms']:10.3f}{summary['p50_ms']:10.2f}{shown}{lag}"


def _arms(with_peers: bool, before: Path | None) -> list[str]:
    names = ["ours", "ours_pd", "aiohttp"]
    if before is not None:
        names += ["before", "before_pd"]
    if with_peers and peers.router():
        names += ["vllm_router", "vllm_router_pd"]
    if with_peers and peers.dynamo():
        names += ["dynamo", "dynamo_fastokens", "ours_marked", "dynamo_marked"]
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="also vllm-router and Dynamo, installed on demand")
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--before", type=Path, help="also our gateway of another checkout")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = args.arms or _arms(args.peers, args.before)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        ends = built_ends(Path(folder))
        with arms(names, ends, Path(folder), args.before) as started:
            bench = Bench(ends, started, args.rounds)
            for scenario in scenarios(args.scale):
                if args.only in scenario.name:
                    results[scenario.name] = bench.run(scenario)
                    print(scenario.name, file=sys.stderr)
    if args.json:
        summaries = {name: {arm: each.summary() for arm, each in figures.items()} for name, figures in results.items()}
        print(json.dumps({"load_average": os.getloadavg(), "scenarios": summaries}, indent=1))
    else:
        print(f"load average {os.getloadavg()[0]:.1f}; medians of {args.rounds} rounds")
        print("\n".join(report(results)))


if __name__ == "__main__":
    main()
