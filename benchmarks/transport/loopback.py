"""How fast one host sends to itself, and what that costs: ours in every integrity mode, peers on demand, alternating.

    python -m benchmarks.transport.loopback [--peers] [--json]

All run over TCP on 127.0.0.1 with the same congestion control. GB/s is wall time of a whole transfer on warm connections; CPU is
user and system time of both ends together, per GB (10^9 bytes).
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.lib import peers
from benchmarks.lib.processes import GreetingChild, our_argv, peer_argv
from transport.control.certificates import Authority

MODES = {"plain": "none", "checksum": "xxh3", "aead": "aes-128-gcm"}
CHUNK_BYTES = 16 << 20  # the most there is: each chunk costs some tenths of a millisecond at both ends together
RANGE_BYTES = 4 << 20


class WarmPair:
    """A sender and a receiver of one kind, warm."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        memory = ["--memory", str(args.mb << 20)]
        if name in MODES:
            mode = ["--integrity", MODES[name], "--certificates", args.certificates]
            options = json.dumps({"connections": args.connections, "chunk_bytes": CHUNK_BYTES})
            tcp = json.dumps({"congestion": args.congestion})
            self.receiver = GreetingChild(our_argv("receiver", *memory, *mode, "--tcp", tcp))
            self.sender = GreetingChild(our_argv("sender", *memory, *mode, "--tcp", tcp, "--options", options))
        else:
            env = peers.environment(UCX_NET_DEVICES="lo", **peers.congestion_shim(args.congestion))
            self.receiver = GreetingChild(peer_argv(name, "receiver", *memory), env, quiet=True)
            self.sender = GreetingChild(peer_argv(name, "sender", *memory), env, quiet=True)
        self._count = 0
        self.samples: list[tuple[float, float]] = []
        self._rest()

    def run(self, mb: int, keep: bool = True) -> None:
        """One transfer. Peers are stopped while others run; ours sleep by themselves."""
        for end in self._ends:
            end.resume()
        try:
            self._run(mb, keep)
        finally:
            self._rest()

    def verify(self) -> None:
        """What arrived is what was sent."""
        for end in self._ends:
            end.resume()
        if self.receiver.ask(digest=True) != self.sender.ask(digest=True):
            raise RuntimeError(f"{self.name}: the bytes differ")

    def _rest(self) -> None:
        if self.name not in MODES:
            for end in self._ends:
                end.pause()

    @property
    def _ends(self) -> tuple[GreetingChild, GreetingChild]:
        return self.receiver, self.sender

    def _run(self, mb: int, keep: bool) -> None:
        self._count += 1
        ranges = (mb << 20) // RANGE_BYTES
        transfer = f"{self.name}-{self._count}"
        self.receiver.ask(expect=transfer, ranges=ranges, range_bytes=RANGE_BYTES)
        self.receiver.ask(cpu=True)
        self.sender.ask(cpu=True)
        greeting = self.receiver.greeting
        result = self.sender.ask(
            push=transfer,
            ranges=ranges,
            range_bytes=RANGE_BYTES,
            address=greeting["address"],
            remote_base=greeting.get("base"),
        )
        if not result["ok"]:
            raise RuntimeError(f"{self.name}: {result}")
        cpu_s = self.receiver.ask(cpu=True)["cpu_s"] + self.sender.ask(cpu=True)["cpu_s"]
        if keep:
            self.samples.append((result["bytes"] / result["seconds"] / 1e9, cpu_s / result["bytes"] * 1e9))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def report(self) -> dict[str, float]:
        speeds, cpus = zip(*self.samples, strict=True)
        return {
            "gb_per_s": round(statistics.median(speeds), 3),
            "gb_per_s_min": round(min(speeds), 3),
            "gb_per_s_max": round(max(speeds), 3),
            "cpu_s_per_gb": round(statistics.median(cpus), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", action="store_true", help="also Mooncake Transfer Engine and NIXL, installed on demand"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mb", type=int, default=512, help="bytes of one transfer, in MiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Authority(Path(folder)).issue("node")
        args.certificates = folder
        report = measure(args)
    print(json.dumps(report, indent=2) if args.json else table(report))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    names = [*args.modes, *(peers.install() if args.peers else [])]
    pairs: list[WarmPair] = []
    with suppress(PermissionError):  # all ends alike, before other work of this machine
        os.nice(-8)
    try:
        for name in names:
            pairs.append(WarmPair(name, args))  # one by one: those that started are closed when the next one fails
        for pair in pairs:
            pair.run(args.mb, keep=False)
        for _ in range(args.repeats):
            for pair in pairs:
                pair.run(args.mb)
        for pair in pairs:
            pair.verify()
    finally:
        for pair in pairs:
            pair.close()
    results = {pair.name: pair.report() for pair in pairs}
    return {
        "mb": args.mb,
        "repeats": args.repeats,
        "connections": args.connections,
        "congestion": args.congestion,
        "load_average": os.getloadavg()[0],
        "results": results,
        **ratios(pairs),
    }


def ratios(pairs: list[WarmPair]) -> dict[str, Any]:
    """Medians over rounds: what ran next to each other is compared, so that a machine busy with other things matters less."""
    ours = [pair for pair in pairs if pair.name in MODES]
    others = [pair for pair in pairs if pair.name not in MODES]
    plain = [pair for pair in ours if pair.name == "plain"]
    found: dict[str, Any] = {}
    if others:
        rounds = list(zip(*(pair.samples for pair in others), strict=True))
        fastest = [max(speed for speed, _ in samples) for samples in rounds]
        cheapest = [min(cpu for _, cpu in samples) for samples in rounds]
        found["ratio_to_best_peer"] = {
            f"{pair.name}_{key}": _median_ratio([sample[i] for sample in pair.samples], best)
            for pair in ours
            for i, (key, best) in enumerate((("gb_per_s", fastest), ("cpu_s_per_gb", cheapest)))
        }
    if plain:
        base = [speed for speed, _ in plain[0].samples]
        found["ratio_to_plain"] = {
            pair.name: _median_ratio([speed for speed, _ in pair.samples], base) for pair in ours
        }
    return found


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def table(report: dict[str, Any]) -> str:
    lines = [f"{'':10} {'GB/s':>6} {'min':>6} {'max':>6} {'CPU-s/GB':>9}"]
    for name, r in report["results"].items():
        lines.append(
            f"{name:10} {r['gb_per_s']:6.2f} {r['gb_per_s_min']:6.2f} {r['gb_per_s_max']:6.2f} {r['cpu_s_per_gb']:9.3f}"
        )
    lines += [f"{key}: {report[key]}" for key in ("ratio_to_best_peer", "ratio_to_plain") if key in report]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
