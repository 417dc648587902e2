"""What grows with layers, blocks and nodes: `python -m benchmarks.growth [--json] [--only PATH …] [--blocks N] [--nodes N]`.

Each path of a node and a gateway runs with a sixteenth, a quarter and all of `--blocks` blocks in a node's cache; with 5, 20
and 80 layers; with a sixteenth, a quarter and all of `--nodes` nodes. A prompt has a sixteenth of a cache's blocks: of a
million, 62,500 blocks of 16 tokens, a million tokens. Pages have next to no bytes; blocks, their hashes and the objects for
them are all there.

    cpu_s             of the process, the better of two tries
    longest_pause_s   the most processor time that the loop's thread took in one go, in the better of two tries
    peak_bytes        what one try allocated, at most
    exponent          growth of cpu_s with layers, blocks and nodes: 1 is in proportion, 0 no growth

`flags` name what should not be: `layers x blocks` (CPU grows with both), and `pause` (the loop stood still for over 10 ms).
An index has at most four million blocks: blocks of a thousand nodes are a sample, of `--blocks` in all.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.growth import gateway_paths, node_paths, tier_paths
from benchmarks.growth.paths import GrowthCost, GrowthSize, Paths, cost_of, rows_of
from node.process.interpreter import favour_the_loop

LAYERS: Final = (5, 20, 80)
STEPS: Final = (16, 4, 1)


def sizes_of(blocks: int, nodes: int) -> list[GrowthSize]:
    """One number at a time: layers and nodes with a sixteenth of the blocks."""
    by_layers = [GrowthSize(layers, blocks // STEPS[0], nodes) for layers in LAYERS]
    by_blocks = [GrowthSize(LAYERS[-1], blocks // step, nodes) for step in STEPS]
    by_nodes = [GrowthSize(LAYERS[-1], blocks // STEPS[0], max(1, nodes // step)) for step in STEPS]
    return list(dict.fromkeys([*by_layers, *by_blocks, *by_nodes]))


def measured(paths: Paths, sizes: list[GrowthSize], only: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of some paths, all at one size and then at the next."""
    costs: dict[str, dict[GrowthSize, GrowthCost]] = {}

    async def at(size: GrowthSize) -> None:
        async for path, act in paths(size):
            if not only or any(each in path for each in only):
                costs.setdefault(path, {})[size] = await cost_of(act)

    for size in sizes:
        asyncio.run(at(size))
    for path, of_path in costs.items():
        yield from rows_of(path, of_path)


def line(row: dict[str, Any]) -> str:
    grown = " ".join("    -" if each is None else f"{each:5.2f}" for each in row["exponent"].values())
    return (
        f"{row['path']:34} {row['layers']:>6} {row['blocks']:>9,} {row['nodes']:>5} {1e3 * row['cpu_s']:>10.2f} "
        f"{1e3 * row['longest_pause_s']:>9.2f} {row['peak_bytes'] / 2**20:>8.1f}  {grown}  {', '.join(row['flags'])}"
    )


HEADER: Final = (
    f"{'path':34} {'layers':>6} {'blocks':>9} {'nodes':>5} {'CPU ms':>10} {'pause ms':>9} {'peak MiB':>8}  "
    "growth with layers, blocks, nodes; flags"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one row a line")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATH", help="paths whose names contain one of these")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=1000)
    args = parser.parse_args()
    favour_the_loop()
    if not args.json:
        print(HEADER)
    sizes = sizes_of(args.blocks, args.nodes)
    alone = list(dict.fromkeys(GrowthSize(size.layers, size.blocks, 1) for size in sizes))
    is_clean = True
    for paths, at in ((node_paths.paths, alone), (tier_paths.paths, alone), (gateway_paths.paths, sizes)):
        for row in measured(paths, at, args.only):
            print(json.dumps(row) if args.json else line(row), flush=True)
            is_clean = is_clean and not row["flags"]
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
