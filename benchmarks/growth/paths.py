"""A path: something that a process does, at sizes; and what it costs there."""

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any, Final

from benchmarks.lib.loop_meter import BEAT_S, LoopMeter

TRIES: Final = 2
PAUSE_S: Final = 0.010  # the longest that a loop may stand still
LAYERS, BLOCKS, NODES = "layers", "blocks", "nodes"
GROWS: Final = 0.3  # an exponent above it is no constant
LEAST_CPU_S: Final = 0.0005  # growth of less is noise
PROMPT_SHARE: Final = 16  # a prompt has a sixteenth of a cache's blocks: a million tokens, of a million


@dataclass(frozen=True, slots=True)
class GrowthSize:
    """Layers of the model, blocks in each node's cache, nodes of the fleet."""

    layers: int
    blocks: int
    nodes: int

    @property
    def prompt_blocks(self) -> int:
        return self.blocks // PROMPT_SHARE


Act = Callable[[], Awaitable[object]]
Paths = Callable[[GrowthSize], AsyncIterator[tuple[str, Act]]]


@dataclass(frozen=True, slots=True)
class GrowthCost:
    """The least of TRIES, but for `peak_bytes`: what was allocated in one more."""

    cpu_s: float
    longest_pause_s: float
    peak_bytes: int


async def cost_of(act: Act) -> GrowthCost:
    """Of a path that can be gone again and again. A pause is processor time of the loop's thread in one go."""
    tries = [await _once(act) for _ in range(TRIES)]
    tracemalloc.start()
    try:
        await act()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return GrowthCost(min(cpu for cpu, _ in tries), min(pause for _, pause in tries), peak)


async def _once(act: Act) -> tuple[float, float]:
    meter = LoopMeter()
    beating = asyncio.create_task(meter.run())
    await asyncio.sleep(2 * BEAT_S)
    meter.reset()
    began = time.process_time()
    await act()
    spent = time.process_time() - began
    await asyncio.sleep(2 * BEAT_S)
    beating.cancel()
    return spent, meter.turn_s


def exponents(costs: Mapping[GrowthSize, GrowthCost]) -> dict[str, float | None]:
    """How CPU grows with each number while the others stay: 1 is in proportion; None: it was not varied."""
    found: dict[str, float | None] = {}
    for name in (LAYERS, BLOCKS, NODES):
        lines: dict[GrowthSize, list[tuple[int, float]]] = {}
        for size, cost in costs.items():
            lines.setdefault(replace(size, **{name: 0}), []).append((getattr(size, name), cost.cpu_s))
        line = max([sorted(line) for line in lines.values()], key=len)
        (small, small_s), (large, large_s) = line[0], line[-1]
        found[name] = None if large == small else log(max(large_s, 1e-9) / max(small_s, 1e-9)) / log(large / small)
    return found


def rows_of(path: str, costs: Mapping[GrowthSize, GrowthCost]) -> list[dict[str, Any]]:
    """One row for each size, the smallest first."""
    ordered = sorted(costs, key=lambda size: (size.layers, size.blocks, size.nodes))
    grown = exponents(costs)
    flags = _flags(costs, grown)
    return [
        {"path": path} | asdict(size) | asdict(costs[size]) | {"exponent": grown, "flags": flags} for size in ordered
    ]


def _flags(costs: Mapping[GrowthSize, GrowthCost], grown: Mapping[str, float | None]) -> list[str]:
    growing = [name for name, exponent in grown.items() if exponent is not None and exponent > GROWS]
    flags = []
    if max(cost.cpu_s for cost in costs.values()) > LEAST_CPU_S and BLOCKS in growing:
        flags += [f"{other} x blocks" for other in (LAYERS, NODES) if other in growing]
    if max(cost.longest_pause_s for cost in costs.values()) > PAUSE_S:
        flags.append("pause")
    return flags
