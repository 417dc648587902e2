"""What a model's layers take of its bytes per second: beside four layers with as many slabs of as many bytes.

    python -m benchmarks.transport.layers [--json] [--models dense-70b v3-mla] [--blocks 16 64] [--tokens 131072] [--rounds 5]

Both models hand over one prompt after the other in turn, as in benchmarks.transport.sizes. The one with four layers has so
many more tokens that both send the same bytes, in slabs as large and as many. The first round is not counted: it opens the
lines of both.

`bytes_ratio` is the median over the rounds of what a model carries per second beside the four layers; `bytes_ratios` has
each. It should be 0.9 at least (`bytes_bar_ok`). `lanes_cpu_ratio` is the same of the lanes' processor time, which other work
on this machine changes less. The rest are medians.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

from benchmarks.lib.sized_models import MODELS, SizedModel
from benchmarks.transport.sizes import CACHED, FULL, NEW, SizedPair

BYTES_BAR: Final = 0.9
FEW_LAYERS: Final = 4
COMPARED: Final = tuple(model.name for model in MODELS.values() if not model.state_layers and model.layers > FEW_LAYERS)
CASES: Final = {NEW: 0, CACHED: 0, FULL: 1}  # and which prompt


def with_few_layers(model: SizedModel, num_tokens: int) -> tuple[SizedModel, int]:
    """The model with four layers, and tokens with which it has as many slabs."""
    few = replace(model, name=f"{FEW_LAYERS} layers", attention_layers=FEW_LAYERS)
    return few, num_tokens * model.layers // FEW_LAYERS


def round_of(pair: SizedPair, number: int) -> dict[str, dict[str, Any]]:
    """Each case once."""
    rows = {}
    for case, prompt in CASES.items():
        if case != FULL:
            pair.forget(at_sender=case == NEW)
        rows[case] = pair.prompt(f"{case}-{number}", case, prompt=prompt)
    return rows


def rows_of(
    model: SizedModel, block_tokens: int, num_tokens: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row for each case."""
    few, few_tokens = with_few_layers(model, num_tokens)
    pairs: list[SizedPair] = []
    try:
        for each, tokens in ((model, num_tokens), (few, few_tokens)):
            pairs.append(SizedPair(each, block_tokens, tokens, args.mb << 20))
            pairs[-1].prompt("warm", NEW, prompt=2)
        rounds = []
        for number in range(args.rounds + 1):
            turn = list(enumerate(pairs))
            rows = {index: round_of(pair, number) for index, pair in (turn if number % 2 else reversed(turn))}
            rounds.append((rows[0], rows[1]))
    finally:
        for pair in pairs:
            pair.close()
    for case in CASES:
        yield compared([(many[case], four[case]) for many, four in rounds[1:]])


def compared(rounds: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """One row of many: of each round that of the model, and that of four layers."""
    first = rounds[0][0]
    ratios = [many["bytes_per_s"] / four["bytes_per_s"] for many, four in rounds]
    return {name: first[name] for name in ("model", "layers", "block_tokens", "slabs", "slab_bytes", "case")} | {
        "bytes_ratios": ratios,
        "bytes_ratio": median(ratios),
        "bytes_bar_ok": median(ratios) >= BYTES_BAR,
        "lanes_cpu_ratio": median(many["lanes_cpu_s"] / four["lanes_cpu_s"] for many, four in rounds),
        "bytes_per_s": median(many["bytes_per_s"] for many, _ in rounds),
        "bytes_per_s_of_four": median(four["bytes_per_s"] for _, four in rounds),
        "lanes_cpu_s": median(many["lanes_cpu_s"] for many, _ in rounds),
        "loop_cpu_s": median(many["loop_cpu_s"] for many, _ in rounds),
        "longest_turn_s": max(many["longest_turn_s"] for many, _ in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one row a line")
    parser.add_argument("--models", nargs="*", default=list(COMPARED), choices=COMPARED)
    parser.add_argument("--blocks", nargs="*", type=int, default=[16, 64], help="tokens of a block")
    parser.add_argument("--tokens", nargs="*", type=int, default=[131_072])
    parser.add_argument("--mb", type=int, default=512, help="bytes of a prompt's KVCache at most, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not args.json:
        print(HEADER)
    for name in args.models:
        for block_tokens in args.blocks:
            for num_tokens in args.tokens:
                for row in rows_of(MODELS[name], block_tokens, num_tokens, args):
                    print(json.dumps(row) if args.json else line(row), flush=True)


HEADER: Final = (
    f"{'model':16} {'layers':>6} {'slab B':>6} {'slabs':>7}  {'MB/s':>6} {'of 4':>6} {'ratio':>6} "
    f"{'lanes CPU':>9}  {'bar':6}  ratios"
)


def line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['case']}"
    return (
        f"{name:16} {row['layers']:>6} {row['slab_bytes']:>6} {row['slabs']:>7}  {row['bytes_per_s'] / 1e6:6.0f} "
        f"{row['bytes_per_s_of_four'] / 1e6:6.0f} {row['bytes_ratio']:6.2f} {row['lanes_cpu_ratio']:9.2f}  "
        f"{'kept' if row['bytes_bar_ok'] else 'missed':6}  {' '.join(f'{ratio:.2f}' for ratio in row['bytes_ratios'])}"
    )


if __name__ == "__main__":
    main()
