"""`python -m tests.fleet.clock FILE MODULE ARGUMENT…`: a module with a time of day of its own.

FILE holds eight bytes, the seconds by which the time of day is wrong, as a double. They may change at any time.

gRPC keeps the time of the machine: its Python half hands moments of the day to its native half, which reads the machine's
clock. With two clocks every deadline of a process that is behind would be over before its call began.
"""

import importlib
import mmap
import runpy
import struct
import sys
import time
import types
from pathlib import Path
from typing import Final

WRONG_BY: Final = struct.Struct("=d")
OF_DEADLINES: Final = ("_channel", "_common", "_cython.cygrpc", "_server", "_utilities", "aio._utils")


def set_clock(file: Path, wrong_by_s: float) -> None:
    """The time of day of the processes that have this file jumps."""
    if not file.exists():
        file.write_bytes(WRONG_BY.pack(wrong_by_s))
    with file.open("r+b") as opened:
        opened.write(WRONG_BY.pack(wrong_by_s))


def _run(file: Path, module: str, arguments: list[str]) -> None:
    with file.open("rb") as opened:
        shared = mmap.mmap(opened.fileno(), WRONG_BY.size, prot=mmap.PROT_READ)
    real_ns, local, universal = time.time_ns, time.localtime, time.gmtime
    of_machine = types.SimpleNamespace(**vars(time))
    for name in OF_DEADLINES:
        importlib.import_module(f"grpc.{name}").__dict__["time"] = of_machine

    def now_ns() -> int:
        return real_ns() + int(WRONG_BY.unpack_from(shared)[0] * 1e9)

    def now_s() -> float:
        return now_ns() / 1e9

    time.time = now_s  # noqa: TID251  it is what is to be wrong
    time.time_ns = now_ns
    time.localtime = lambda seconds=None, /: local(now_s() if seconds is None else seconds)
    time.gmtime = lambda seconds=None, /: universal(now_s() if seconds is None else seconds)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
