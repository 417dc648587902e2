"""`python -m tests.gpu [--json FILE]`: what only a GPU can show. A part that lacks what it needs is skipped, and says why.

A   copies are ordered, and at rate; without the waits they are not (negative control). Needs PyTorch with CUDA.
B   two vLLM servers on one GPU answer like one, and send what the layout says. Needs vLLM, too, as the others do.
C   first tokens and the time between tokens beside a plain server, and how much leaves before a prefill ends.
D   the server that prefills is killed in the middle of a leg, and serves again.

`--limit-s` is for all of it: what no longer fits is skipped, and says so. `--device cpu` is a dry run of B to D with small
models: tokens and bytes are judged, times are not.
"""

import argparse
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from tests.gpu.results import PartResult, Report, TimeBudget, judged, skipped

RATE_BYTES = 1 << 30
BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20)
LEAST_GB_PER_S = 40.0  # to the host, in blocks of 64 KiB
LIMITS_S: Final = {"cuda": 570.0, "cpu": 7200.0}
GRACE_S: Final = 15.0  # behind the limit
PARTS: Final = ("A", "B", "C", "D")


def part_a() -> PartResult:
    if not torch.cuda.is_available():
        return skipped("A", f"needs PyTorch with CUDA and a GPU: torch {torch.__version__} sees none")
    from tests.gpu.driver import Gpu
    from tests.gpu.ordering import ordering, rates

    torch.cuda.set_device(0)
    wrong, control = [], {}
    for registers in (True, False):
        wrong += ordering(Gpu(registers=registers), registered=registers)
        control[registers] = ordering(Gpu(registers=registers), registered=registers, waits=False)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "copies_with": Gpu().copies_with}
    figures |= {"wrong": wrong, "wrong_without_waits": {"direct": len(control[True]), "buffered": len(control[False])}}
    for size in BLOCK_BYTES:
        for registered in (True, False):
            name = f"{size >> 10}_kib_{'direct' if registered else 'buffered'}"
            figures[name] = rates(Gpu(), total_bytes=RATE_BYTES, block_bytes=size, registered=registered)
    torch.cuda.empty_cache()  # of this process, beside which servers run
    rate = figures["64_kib_direct"]["to_host_gb_per_s"]
    reasons = ["copies out of order"] if wrong else []
    reasons += [] if all(control.values()) else ["without waits nothing went wrong, so the rounds show nothing"]
    reasons += [] if rate >= LEAST_GB_PER_S else [f"{rate:.1f} GB/s to the host, {LEAST_GB_PER_S} are wanted"]
    return judged("A", reasons, figures)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="What only a GPU can show.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go, too, each as soon as it is there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of B to D")
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="A,B", help="which ones (default: all)")
    parser.add_argument("--models", metavar="NAME,NAME", help="of part B (default: all of the device's)")
    parser.add_argument(
        "--limit-s", type=_seconds, metavar="S", help="what no longer fits is skipped (default: 570; cpu: 7200)"
    )
    arguments = parser.parse_args(argv)
    budget = TimeBudget(arguments.limit_s or LIMITS_S[arguments.device], time.monotonic())
    report = Report(arguments.device, budget, arguments.json)
    wanted = arguments.parts
    cut = threading.Timer(budget.limit_s + GRACE_S, _cut, [report])
    cut.daemon = True
    cut.start()
    if "A" in wanted:
        report.awaits("A")
        report.add(whatever_it_lacks("A", part_a))
    _servers([part for part in wanted if part != "A"], arguments, report)
    cut.cancel()
    print(report.text())
    return 1 if report.has_failed else 0


def _servers(wanted: Sequence[str], arguments: argparse.Namespace, report: Report) -> None:
    try:
        from tests.gpu.servers import run_parts
        from tests.gpu.settings import CPU, CUDA
    except ModuleNotFoundError as error:
        for part in wanted:
            report.add(skipped(part, f"needs the package {error.name}"))
        return
    setting = CPU if arguments.device == "cpu" else CUDA
    if arguments.models:
        setting = dataclasses.replace(setting, models=tuple(arguments.models.split(",")))
    run_parts(setting, wanted, report)


def whatever_it_lacks(name: str, part: Callable[[], PartResult]) -> PartResult:
    """A part's result; where a package is missing, that."""
    try:
        return part()
    except ModuleNotFoundError as error:
        return skipped(name, f"needs the package {error.name}")
    except (RuntimeError, OSError) as error:
        return judged(name, [f"{type(error).__name__}: {error}"], {})


def _cut(report: Report) -> None:
    """A run that does not come to its end has its results in the file. Servers end with the processes that started them."""
    report.cut()
    print(report.text(), flush=True)
    os._exit(1)


def _parts(said: str) -> tuple[str, ...]:
    parts = tuple(said.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no part; there are {', '.join(PARTS)}")
    return parts


def _seconds(said: str) -> float:
    if not 0 < (seconds := float(said)) < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{said} s are no limit")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
