"""How much of a long, lossy link a transfer fills: ours per congestion control, Mooncake on demand.

    python -m benchmarks.transport.wan --rate-mbit 500 --rtt-ms 40 --loss 0.0001 [--peers] [--json]
    python -m benchmarks.transport.wan --scenario weights|rate_drop|overlap

Runs over an emulated link between two network namespaces (benchmarks/lib/wanem.py). `goodput_fraction` is payload per
second of a whole transfer, over the most that TCP could carry at this rate and MTU. A transfer lasts from open() on
fresh connections to its last acknowledgement; `goodput_fraction_64mb` the same for 64 MiB afterwards, on the then warm
connections, median of three. `retransmitted_share` counts bytes that TCP sent again; `retransmitted_beyond_loss` leaves
out those that the emulator lost at random.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.lib import peers
from benchmarks.lib.processes import GreetingChild, our_argv, peer_argv
from benchmarks.lib.wanem import ADDRESSES, Wan, why_not

MB = 1 << 20
WARM_MB = 64
WARM_RUNS = 3
PEER_BLOCK_BYTES = 4 * MB  # their better size of those tried
PEER_CONTROLS = ("cubic", "bbr")
PEERS = ("mooncake",)  # NIXL's transfers have not been seen to end over this link
PAUSE_S = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=500.0)
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    parser.add_argument("--loss", type=float, default=0.0001, help="probability of losing a packet, each way")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--cc", nargs="*", default=["auto", "cubic"], help="congestion controls to ask for")
    parser.add_argument("--connections", type=int, default=4, help="to begin with")
    parser.add_argument("--budget-mbit", type=float, help="configured egress budget; without it, what is measured")
    parser.add_argument("--peers", action="store_true", help="also Mooncake Transfer Engine, installed on demand")
    parser.add_argument("--scenario", choices=["fill", *SCENARIOS], default="fill")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"benchmarks.transport.wan: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are taken down on the way out
    report = fill(args) if args.scenario == "fill" else SCENARIOS[args.scenario](args)
    report = {"load_average": os.getloadavg()[0], **report}
    print(json.dumps(report, indent=2) if args.json else table(report))


def wan_of(args: argparse.Namespace) -> Wan:
    return Wan(rate_mbit=args.rate_mbit, rtt_ms=args.rtt_ms, loss=args.loss, mtu=args.mtu)


@contextmanager
def our_ends(wan: Wan, args: argparse.Namespace, cc: str, mb: int) -> Iterator[tuple[GreetingChild, GreetingChild]]:
    options: dict[str, Any] = {"connections": args.connections}
    if args.budget_mbit:
        options["egress_bytes_per_s"] = args.budget_mbit * 1e6 / 8
    common = ["--memory", str(mb * MB), "--integrity", "xxh3", "--tcp", json.dumps({"congestion": cc})]
    receiver = GreetingChild(wan.command("b", our_argv("receiver", "--host", ADDRESSES["b"], *common)))
    try:
        sender = GreetingChild(wan.command("a", our_argv("sender", "--options", json.dumps(options), *common)))
        try:
            yield sender, receiver
        finally:
            sender.close()
    finally:
        receiver.close()


def push(sender: GreetingChild, receiver: GreetingChild, name: str, mb: int, **more: Any) -> dict[str, Any]:
    receiver.ask(expect=name, ranges=mb, range_bytes=MB)
    result = sender.ask(push=name, ranges=mb, range_bytes=MB, address=receiver.greeting["address"], **more)
    if not result["ok"]:
        raise RuntimeError(f"{name}: {result}")
    return result


def fill(args: argparse.Namespace) -> dict[str, Any]:
    with wan_of(args) as wan:
        ours = {cc: fill_ours(wan, args, cc) for cc in args.cc}
        names = [name for name in peers.install() if name in PEERS] if args.peers else []
        theirs = {name: {cc: fill_peer(wan, name, cc) for cc in PEER_CONTROLS} for name in names}
    report = {
        "rate_mbit": args.rate_mbit, "rtt_ms": args.rtt_ms, "loss": args.loss, "mb": args.mb,
        "budget_mbit": args.budget_mbit, "ours": ours,
    }  # fmt: skip
    if theirs:
        report["peers"] = theirs
        by_control = {result["congestion_control"]: result for result in ours.values()}
        best = {cc: max(found[cc]["goodput_fraction_64mb"] for found in theirs.values()) for cc in PEER_CONTROLS}
        report["ratio_to_best_peer"] = {
            cc: round(by_control[cc]["goodput_fraction_64mb"] / best[cc], 2) for cc in PEER_CONTROLS if cc in by_control
        }
    return report


def fill_ours(wan: Wan, args: argparse.Namespace, cc: str) -> dict[str, Any]:
    with our_ends(wan, args, cc, args.mb) as (sender, receiver):
        wan.stats()
        cold = push(sender, receiver, "cold", args.mb)
        emulator = wan.stats()["a_to_b"]
        warm = []
        for i in range(WARM_RUNS):
            time.sleep(PAUSE_S)
            warm.append(push(sender, receiver, f"warm-{i}", min(WARM_MB, args.mb)))
    share = cold["retransmitted_bytes"] / cold["bytes"]
    return {
        "goodput_fraction": round(cold["bytes"] / cold["seconds"] / wan.payload_bytes_per_s, 3),
        "goodput_fraction_64mb": median_fraction(wan, warm),
        "retransmitted_share": round(share, 4),
        "retransmitted_beyond_loss": round(max(0.0, share - emulator["lost"] / emulator["packets"]), 4),
        "rtt_inflation_p50": round(cold["rtt_inflation_p50"], 2),
        "rtt_inflation_max": round(cold["rtt_inflation_max"], 2),
        "congestion_control": cold["congestion_control"],
        "connections": cold["connections"],
        "lost_packets": emulator["lost"],
        "dropped_by_queue": emulator["dropped"],
    }


def fill_peer(wan: Wan, name: str, cc: str) -> dict[str, Any]:
    """64 MiB from memory to memory, connections warm; the first transfer is the cold one."""
    memory = ["--memory", str(WARM_MB * MB)]
    env = peers.environment(UCX_NET_DEVICES="wan0", **peers.congestion_shim(cc))
    receiver = GreetingChild(
        wan.command("b", peer_argv(name, "receiver", "--host", ADDRESSES["b"], *memory)), env, quiet=True
    )
    sender = GreetingChild(
        wan.command("a", peer_argv(name, "sender", "--host", ADDRESSES["a"], *memory)), env, quiet=True
    )
    try:
        results = [
            sender.ask(
                push="t", ranges=WARM_MB * MB // PEER_BLOCK_BYTES, range_bytes=PEER_BLOCK_BYTES,
                address=receiver.greeting["address"], remote_base=receiver.greeting["base"],
            )
            for _ in range(WARM_RUNS + 1)
        ]  # fmt: skip
    finally:
        sender.close()
        receiver.close()
    return {"goodput_fraction_64mb": median_fraction(wan, results[1:]), "cold": median_fraction(wan, results[:1])}


def median_fraction(wan: Wan, results: list[dict[str, Any]]) -> float:
    fractions = [result["bytes"] / result["seconds"] / wan.payload_bytes_per_s for result in results]
    return round(statistics.median(fractions), 3)


def weights(args: argparse.Namespace) -> dict[str, Any]:
    """Two tenants, weights 2 and 1: the bytes of each when the first is through."""
    mb, shares = 96, {"heavy": 2.0, "light": 1.0}
    with wan_of(args) as wan, our_ends(wan, args, args.cc[0], mb) as (sender, receiver):
        push(sender, receiver, "warm-up", 32)
        for name, weight in shares.items():
            push(sender, receiver, name, mb, tenant=name, weight=weight, background=True)
        progress = sender.ask(progress=True)
        while progress["heavy"] < mb * MB * 0.9:
            time.sleep(0.05)
            progress = sender.ask(progress=True)
    return {"scenario": "weights", "configured": 2.0, "measured": round(progress["heavy"] / progress["light"], 3)}


def rate_drop(args: argparse.Namespace) -> dict[str, Any]:
    """The link falls to a fifth in mid-transfer: when that shows in LinkState, how long the queue gets, and for how long.

    Queues are read from the emulator, in round trips: bytes over rate × RTT at the new rate.
    """
    low = args.rate_mbit / 5
    with wan_of(args) as wan, our_ends(wan, args, args.cc[0], 256) as (sender, receiver):
        address = receiver.greeting["address"]
        push(sender, receiver, "warm-up", 64)
        push(sender, receiver, "t", 256, background=True)
        time.sleep(1.5)
        before = sender.ask(link=address)
        wan.stats()
        queued_before = wan.stats()["a_to_b"]["queue_bytes"]
        wan.set_rate(low)
        path_bytes = low * 1e6 / 8 * args.rtt_ms / 1e3  # one round trip of the narrow link
        dropped_at, samples = time.monotonic(), []
        while time.monotonic() < dropped_at + 4.0:
            time.sleep(0.01)
            state, emulator = sender.ask(link=address), wan.stats()["a_to_b"]
            samples.append((time.monotonic() - dropped_at, state, emulator))
    noticed = [at for at, state, _ in samples if state["goodput_mbit"] < 1.25 * low]
    congested = [at for at, state, _ in samples if state["congested"]]
    queues = [(at, emulator["queue_bytes"] / path_bytes) for at, _, emulator in samples]
    starts = [0.0, *(at for at, _ in queues)]
    over = [(at, at - start) for start, (at, queue) in zip(starts, queues, strict=False) if queue > 2.0]
    return {
        "scenario": "rate_drop",
        "goodput_mbit_before": round(before["goodput_mbit"], 1),
        "goodput_mbit_after": round(samples[-1][1]["goodput_mbit"], 1),
        "noticed_s": round(noticed[0], 2) if noticed else None,
        "congested_signal_s": round(congested[0], 2) if congested else None,
        "queue_before_rtts": round(queued_before / path_bytes, 2),
        "queue_max_rtts": round(max(emulator["max_queue_bytes"] for _, _, emulator in samples) / path_bytes, 2),
        "queue_over_2rtt_s": round(sum(duration for _, duration in over), 2),
        "queue_below_2rtt_from_s": round(over[-1][0], 2) if over else 0.0,
        "queue_max_after_that_rtts": round(max(q for at, q in queues if not over or at > over[-1][0]), 2),
        "queue_max_after_1s_rtts": round(max(queue for at, queue in queues if at > 1.0), 2),
        "dropped_by_queue": sum(emulator["dropped"] for _, _, emulator in samples),
        "queue_rtts_every_50_ms": [round(_at(queues, i * 0.05), 1) for i in range(1, 13)],
    }


def _at(series: list[tuple[float, float]], when: float) -> float:
    return next((value for at, value in series if at >= when), series[-1][1])


def overlap(args: argparse.Namespace) -> dict[str, Any]:
    """A prefill as long as its transfer, layer by layer: the total over the longer of the two."""
    mb = 128
    with wan_of(args) as wan, our_ends(wan, args, args.cc[0], mb) as (sender, receiver):
        push(sender, receiver, "warm-up", 64)
        alone = push(sender, receiver, "alone", mb)["seconds"]
        together = push(sender, receiver, "layers", mb, compute_s=alone)["seconds"]
    return {
        "scenario": "overlap",
        "transfer_s": round(alone, 3),
        "prefill_s": round(alone, 3),
        "total_s": round(together, 3),
        "total_over_longer": round(together / alone, 3),
    }


SCENARIOS = {"weights": weights, "rate_drop": rate_drop, "overlap": overlap}


def table(report: dict[str, Any]) -> str:
    if "ours" not in report:
        return "\n".join(f"{key}: {value}" for key, value in report.items())
    lines = [f"{'':16} {'1 GB':>6} {'64 MB':>6} {'resent':>7} {'beyond':>7} {'RTT p50':>8} {'max':>5} {'conns':>5}"]
    lines[0] = lines[0].replace("  1 GB", f"{report['mb']:>3} MB")
    for cc, r in report["ours"].items():
        lines.append(
            f"{cc + '/' + r['congestion_control']:16} {r['goodput_fraction']:6.3f} {r['goodput_fraction_64mb']:6.3f} "
            f"{r['retransmitted_share']:7.2%} {r['retransmitted_beyond_loss']:7.2%} {r['rtt_inflation_p50']:8.2f} "
            f"{r['rtt_inflation_max']:5.2f} {r['connections']:5d}"
        )
    for name, controls in report.get("peers", {}).items():
        for cc, r in controls.items():
            lines.append(f"{name + '/' + cc:16} {'':6} {r['goodput_fraction_64mb']:6.3f}   (cold {r['cold']})")
    if "ratio_to_best_peer" in report:
        lines.append(f"ratio_to_best_peer (64 MB): {report['ratio_to_best_peer']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
