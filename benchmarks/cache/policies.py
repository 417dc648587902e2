"""Measures the cache on a recorded trace.

python -m benchmarks.cache.policies --trace FILE [--policy P ...] [--capacity-blocks N | --capacity-frac F ...] [--json]
python -m benchmarks.cache.policies --trace FILE --prefix ...     hits as prefix hits on real block chains
python -m benchmarks.cache.policies --trace FILE --hybrid ...     token hits and FLOPs saved of a 1T hybrid model
python -m benchmarks.cache.policies --trace FILE --prefix --plot out.png
python -m benchmarks.cache.policies --trace FILE --prefix --half 2        that half alone, from an empty cache
python -m benchmarks.cache.policies --trace FILE --prefix --margin        the default's lead over the best classic
python -m benchmarks.cache.policies --speed                       the hot operations, no trace needed
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.cache.replay import CLASSICS, Replay, Result, flat_replays, margin, prefix_replays, run
from benchmarks.cache.traces import RecordedTrace, read_trace

DEFAULT_FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    try:
        if arguments.speed:
            from benchmarks.cache.speed import measure

            _print(measure(), arguments.json)
            return 0
        trace = read_trace(arguments.trace)
        if arguments.half:
            trace = trace.half(arguments.half)
        if arguments.hybrid:
            from benchmarks.cache.hybrid import compare

            _print(compare(trace, arguments.pool_gb), arguments.json)
            return 0
        results = _replay(trace, arguments)
    except (OSError, ValueError) as exc:
        print(f"benchmarks.cache: {exc}", file=sys.stderr)
        return 2
    if arguments.plot:
        from benchmarks.cache.plot import plot

        plot(trace, results, arguments.plot, "prefix hits" if arguments.prefix else "block hits")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache.policies", description="Measures the cache on a trace."
    )
    parser.add_argument("--trace", type=Path, help="a .jsonl, .jsonl.xz or .jsonl.zst file with hash_ids")
    parser.add_argument("--half", type=int, choices=(1, 2), help="replay only that half of the requests")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--policy", action="append", help="lower-case name; may be given again (default: all)")
    which.add_argument("--margin", action="store_true", help="print how far the default is above the best classic")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--capacity-blocks", type=int, action="append", help="may be given again")
    size.add_argument("--capacity-frac", type=float, action="append", help="of the footprint, may be given again")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--prefix", action="store_true", help="count prefix hits on block chains")
    kind.add_argument("--hybrid", action="store_true", help="a hybrid model: full attention and linear states")
    kind.add_argument("--speed", action="store_true", help="time the hot operations")
    parser.add_argument("--pool-gb", type=float, action="append", help="pool sizes for --hybrid (default 40 100 400)")
    parser.add_argument("--plot", type=Path, help="write hit ratio over capacity as a picture")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args(argv)
    if not arguments.speed and arguments.trace is None:
        parser.error("--trace is needed")
    return arguments


def _replay(trace: RecordedTrace, arguments: argparse.Namespace) -> list[Result]:
    replays = prefix_replays() if arguments.prefix else flat_replays()
    names = ["default", *CLASSICS] if arguments.margin else arguments.policy or list(replays)
    results = []
    for capacity in _capacities(trace, arguments):
        of_capacity = []
        for name in names:
            of_capacity.append(run(name, trace, capacity, _known(replays, name)))
            if not arguments.margin:
                _print([of_capacity[-1].table()], arguments.json)
        if arguments.margin:
            _print([margin(of_capacity)], arguments.json)
        results += of_capacity
    return results


def _known(replays: dict[str, Replay], name: str) -> Replay:
    if name not in replays:
        raise ValueError(f"unknown policy {name!r}; there are: {', '.join(replays)}")
    return replays[name]


def _capacities(trace: RecordedTrace, arguments: argparse.Namespace) -> list[int]:
    if arguments.capacity_blocks:
        capacities = arguments.capacity_blocks
    else:
        footprint = trace.footprint
        capacities = [round(footprint * fraction) for fraction in arguments.capacity_frac or DEFAULT_FRACTIONS]
    if min(capacities) <= 0:
        raise ValueError("a capacity must be at least one block")
    return list(capacities)


def _print(tables: Iterable[dict[str, str | int | float]], as_json: bool) -> None:
    for table in tables:
        if as_json:
            print(json.dumps(table), flush=True)
        else:
            print("  ".join(f"{key}={_short(value)}" for key, value in table.items()), flush=True)


def _short(value: str | int | float) -> str:
    return f"{value:.4f}" if isinstance(value, float) and value < 10 else str(value)


if __name__ == "__main__":
    sys.exit(main())
