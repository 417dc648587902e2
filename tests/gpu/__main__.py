"""`python -m tests.gpu [--json FILE]`: what only a GPU can show. A part that lacks what it needs is skipped, and says why.

A   copies are ordered, and at rate; without the waits they are not (negative control). Needs PyTorch with CUDA.
B   two vLLM servers on one GPU answer like one, and send what the layout says. Needs vLLM, too, as the others do.
C   first tokens and the time between tokens beside a plain server, and how much leaves before a prefill ends.
D   the server that prefills is killed in the middle of a leg, and serves again.

`--device cpu` is a dry run of B to D with a tiny model: tokens and bytes are judged, times are not.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.vllm.worker_side.accelerator import AcceleratorDevice
from tests.gpu.driver import direct_copies
from tests.gpu.ordering import ordering, rates
from tests.gpu.results import PartResult, judged
from tests.gpu.servers import run_parts

SLOW_MATMULS, SLOW_SIZE = 8, 8192  # about 10 ms
RATE_BYTES = 1 << 30
BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20)
LEAST_GB_PER_S = 40.0  # to the host, in blocks of 64 KiB


class Gpu:
    """The first GPU, and a model that is slow."""

    def __init__(self, *, registers: bool = True) -> None:
        self.torch_device = torch.device("cuda", 0)
        self.copies_with, direct = direct_copies()
        self._matrix = torch.ones((SLOW_SIZE, SLOW_SIZE), dtype=torch.bfloat16, device=self.torch_device)
        self.port = AcceleratorDevice(self.torch_device, direct if registers else None)

    def launch(self, work: Callable[[], object]) -> None:
        for _ in range(SLOW_MATMULS):
            torch.mm(self._matrix, self._matrix)
        work()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def part_a() -> PartResult:
    if not torch.cuda.is_available():
        return PartResult("A", "skipped", f"needs PyTorch with CUDA and a GPU: torch {torch.__version__} sees none", {})
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
    rate = figures["64_kib_direct"]["to_host_gb_per_s"]
    reasons = ["copies out of order"] if wrong else []
    reasons += [] if all(control.values()) else ["without waits nothing went wrong, so the rounds show nothing"]
    reasons += [] if rate >= LEAST_GB_PER_S else [f"{rate:.1f} GB/s to the host, {LEAST_GB_PER_S} are wanted"]
    return judged("A", reasons, figures)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="What only a GPU can show.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go, too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of B to D")
    parser.add_argument("--parts", default="A,B,C,D", metavar="A,B", help="which ones (default: all)")
    arguments = parser.parse_args(argv)
    wanted = arguments.parts.split(",")
    began_s = time.monotonic()
    results = [part_a()] if "A" in wanted else []
    results += run_parts(arguments.device, [part for part in wanted if part != "A"])
    for result in results:
        print(f"{result.part}: {result.outcome} {result.reason}", flush=True)
    said: dict[str, Any] = {"device": arguments.device, "seconds": round(time.monotonic() - began_s, 1)}
    said["parts"] = [vars(result) for result in results]
    text = json.dumps(said, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text)
    return 1 if any(result.outcome == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
