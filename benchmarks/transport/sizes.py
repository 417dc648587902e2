"""What a prompt costs two agents whose model has the layers, blocks and tokens that people serve.

    python -m benchmarks.transport.sizes [--json] [--models dense-70b ...] [--blocks 16 64 native] [--tokens 131072 ...]

Two agents' parts, without engines, each in a process of its own, over loopback. After a short prompt, which opens the link:
a reservation, a prefill whose layers are done one after the other, the transfer, the claim (`new`); then the same prompt
again, cached at the sender (`cached`); then another one, for which both have to evict the first (`full`). Bytes of tokens and
states are scaled down until a prompt fits into `--mb`; the numbers of layers and blocks are real.

`runs` are those of hybrid_cache.layout.transfers: of each layer all blocks. `cpu_bar_s` is what the loops should spend on one
prompt at most, 20 ms and 1 µs for each run; `cpu_bar_ok` says whether `loop_cpu_s` is within it. `pause_bar_ok` is the same for
`longest_turn_s` and 10 ms.

`longest_pause_s` is the longest time in which an agent's loop ran nothing else, `longest_turn_s` the most processor time of
its thread in one go: the former includes what other processes of this machine took. `loop_cpu_s` is the loops' processor time
for one prompt, but for the wait until it is delivered. The meter's beats and what four idle calls take are not in it, either.
`cpu_s` is the time of the processes, their lanes included; `lanes_cpu_s` is without the loops'. Bytes per second count from
when the first layer could leave until the sender has heard that all have arrived. benchmarks.transport.layers compares them.
"""

import argparse
import json
import sys
from typing import Any, Final

from benchmarks.lib.processes import GreetingChild
from benchmarks.lib.sized_models import MODELS, SizedModel

TOKENS: Final = (8192, 131_072)
BLOCKS: Final = ("16", "64", "native")
NEW, CACHED, FULL = "new", "cached", "full"
WAITING: Final = "delivered"
PAUSE_BAR_S: Final = 0.01
CPU_BAR_S: Final = 0.02  # of both loops for one prompt, and
RUN_BAR_S: Final = 1e-6  # for each run
IDLE_CALLS: Final = 5
STEPS: Final = ("reserve", "begin", "compute", "delivered", "claim")


class SizedPair:
    """A sender and a receiver of one layout."""

    def __init__(self, model: SizedModel, block_tokens: int, num_tokens: int, max_bytes: int) -> None:
        scale = model.scale_within(num_tokens, max_bytes)
        layout = model.layout(block_tokens, scale)
        self.facts = {
            "model": model.name,
            "layers": model.layers,
            "block_tokens": block_tokens,
            "prompt_tokens": num_tokens,
            "slabs": sum(
                len(entry.layers) * (1 if group in layout.state_groups else -(-num_tokens // block_tokens))
                for group, entry in enumerate(layout.groups)
            ),
            "runs": sum(len(entry.layers) for entry in layout.groups),
            "slab_bytes": layout.slab_bytes(0),
        }
        self._sender, self._receiver = (
            GreetingChild(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.transport.sized_node",
                    name,
                    layout.to_json(),
                    "--tokens",
                    str(num_tokens),
                ]
            )
            for name in ("sender", "receiver")
        )

    def forget(self, *, at_sender: bool = True) -> None:
        """Clears the cache of the receiver, or of both."""
        for end in (self._sender, self._receiver) if at_sender else (self._receiver,):
            end.ask(clear=True)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()

    def prompt(self, job: str, case: str, prompt: int = 0) -> dict[str, Any]:
        """One prompt, from the reservation to the end of its jobs."""
        sender, receiver = self._sender, self._receiver
        # What a call costs for which nothing is done, of either end.
        idle_s = {end: min([end.ask()["loop_s"] for _ in range(IDLE_CALLS + 1)][1:]) for end in (sender, receiver)}
        reserved = receiver.ask(reserve=True, prompt=prompt)
        begun = sender.ask(begin=job, ticket=reserved["ticket"], prompt=prompt)
        computed = sender.ask(compute=job, cached=begun["cached"], prompt=prompt)
        sent = sender.ask(delivered=job)
        claimed = receiver.ask(claim=reserved["ticket"]["transfer_id"], prompt=prompt)
        if not sent["ok"]:
            raise RuntimeError(f"{self.facts}: {sent}")
        answers = dict(zip(STEPS, (reserved, begun, computed, sent, claimed), strict=True))
        turn_s = max(each["turn_s"] for each in answers.values())
        calls_s = 2 * idle_s[sender] + 2 * idle_s[receiver]
        loop_s = sum(each["loop_s"] for step, each in answers.items() if step != WAITING) + sent["turn_s"] - calls_s
        bar_s = CPU_BAR_S + RUN_BAR_S * self.facts["runs"]
        return self.facts | {
            "case": case,
            "longest_pause_s": max(each["pause_s"] for each in answers.values()),
            "longest_turn_s": turn_s,
            "pause_bar_ok": turn_s <= PAUSE_BAR_S,
            "loop_cpu_s": loop_s,
            "cpu_bar_s": bar_s,
            "cpu_bar_ok": loop_s <= bar_s,
            "cpu_s": sum(each["cpu_s"] for each in answers.values()),
            "peak_bytes": max(claimed["peak_bytes"], sent["peak_bytes"]),
            "lanes_cpu_s": sum(each["cpu_s"] - each["loop_s"] for each in answers.values()),
            "bytes_per_s": sent["bytes"] / sent["taken_s"],
            "pauses_s": {step: each["pause_s"] for step, each in answers.items()},
            "turns_s": {step: each["turn_s"] for step, each in answers.items()},
        }


def rows_of(model: SizedModel, block_tokens: int, num_tokens: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each case."""
    pair = SizedPair(model, block_tokens, num_tokens, args.mb << 20)
    try:
        pair.prompt("warm", NEW, prompt=2)
        pair.forget()
        rows = [pair.prompt("first", NEW)]
        pair.forget(at_sender=False)
        rows.append(pair.prompt("again", CACHED))
        rows.append(pair.prompt("other", FULL, prompt=1))
    finally:
        pair.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one row a line")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--blocks", nargs="*", default=list(BLOCKS), help="tokens of a block, or native")
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--mb", type=int, default=512, help="bytes of a prompt's KVCache at most, in MiB")
    args = parser.parse_args()
    if not args.json:
        print(HEADER)
    for name in args.models:
        model = MODELS[name]
        blocks = dict.fromkeys(model.native_block if block == "native" else int(block) for block in args.blocks)
        for block_tokens in blocks:
            for num_tokens in args.tokens:
                for row in rows_of(model, block_tokens, num_tokens, args):
                    print(json.dumps(row) if args.json else line(row), flush=True)


HEADER: Final = (
    f"{'model':16} {'layers':>6} {'block':>5} {'tokens':>8} {'slabs':>7} {'runs':>4}  "
    f"{'pause ms':>8} {'turn ms':>8} {'loop ms':>8} {'CPU ms':>8} {'MiB':>5} {'MB/s':>6} {'bars':>9}   "
    f"turn ms of {', '.join(STEPS)}"
)


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['case']}"
    missed = [name for name in ("pause", "cpu") if not row[f"{name}_bar_ok"]]
    bars = f"not {','.join(missed)}" if len(missed) == 1 else "neither" if missed else "both"
    turns = " ".join(f"{1e3 * turn_s:.1f}" for turn_s in row["turns_s"].values())
    return (
        f"{name:22} {row['layers']:>3} {row['block_tokens']:>4} {row['prompt_tokens']:>8} {row['slabs']:>7} {row['runs']:>4}  "
        f"{1e3 * row['longest_pause_s']:8.1f} {1e3 * row['longest_turn_s']:8.1f} {1e3 * row['loop_cpu_s']:8.1f} "
        f"{1e3 * row['cpu_s']:8.0f} {row['peak_bytes'] >> 20:5} {row['bytes_per_s'] / 1e6:6.0f} {bars:>9}   {turns}"
    )


if __name__ == "__main__":
    main()
