"""What an endpoint picker costs behind Envoy: CPU for each request, and latency beside Envoy alone.

python -m benchmarks.epp [--requests 200] [--json]

Arms run one after the other, each with the same prompts, which no two requests share. `EPP_COMMAND` measures another picker
(`tests/epp/world.py`). CPU is that of the picker's process and of Envoy's, by /proc. Requests come one after the other for
latency, and sixteen at once for CPU. The servers answer at once, in the process that asks: it competes for the cores.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tests.epp.envoy import DUPLEX, OWN, STANDARD, Way
from tests.epp.world import PickerWorld, picker_world

ARMS: Final = {
    "Envoy alone": Way(asks=False),
    "buffered": OWN,
    "duplex request": Way(request=DUPLEX),
    "full duplex": STANDARD,
}
PROMPTS: Final = {"200 tokens": 800, "28 KB": 28_000, "100K tokens": 400_000}  # bytes
AT_ONCE: Final = 16
WARM_UP: Final = 20
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerCost:
    """Of one arm and length of prompt."""

    arm: str
    prompt: str
    picker_cpu_ms: float
    envoy_cpu_ms: float
    p50_ms: float
    p99_ms: float
    added_p50_ms: float = field(default=0.0)


def prompt(num_bytes: int) -> bytes:
    """A chat of so many bytes that no other one begins like."""
    messages = [{"role": "user", "content": os.urandom(num_bytes // 2).hex()}]
    return json.dumps({"model": "m", "messages": messages}).encode()


async def measure(arm: str, way: Way, requests: int) -> list[PickerCost]:
    """All prompts in one arm."""
    with tempfile.TemporaryDirectory() as folder:
        async with picker_world(Path(folder), way) as world:
            return [await _measured(world, arm, name, size, requests) for name, size in PROMPTS.items()]


async def _measured(world: PickerWorld, arm: str, name: str, num_bytes: int, requests: int) -> PickerCost:
    assert world.picker is not None
    assert world.envoy is not None
    for _ in range(WARM_UP):
        await _ask(world, prompt(num_bytes))
    took = [await _ask(world, prompt(num_bytes)) for _ in range(requests)]
    bodies = [prompt(num_bytes) for _ in range(requests)]
    before = cpu_s(world.picker.pid), cpu_s(world.envoy.pid)
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(body: bytes) -> None:
        async with room:
            await _ask(world, body)

    begun = time.perf_counter()
    await asyncio.gather(*map(ask, bodies))
    lasted = time.perf_counter() - begun
    spent = cpu_s(world.picker.pid) - before[0], cpu_s(world.envoy.pid) - before[1]
    idle = await _idle_cpu(world) * lasted
    return PickerCost(
        arm=arm,
        prompt=name,
        picker_cpu_ms=1000 * max(0.0, spent[0] - idle) / requests,
        envoy_cpu_ms=1000 * spent[1] / requests,
        p50_ms=1000 * statistics.median(took),
        p99_ms=1000 * statistics.quantiles(took, n=100)[98],
    )


async def _ask(world: PickerWorld, body: bytes) -> float:
    begun = time.perf_counter()
    told = await world.ask(body)
    if told.status != 200:
        raise RuntimeError(f"{told.status}: {told.body[:200]!r}")
    return time.perf_counter() - begun


async def _idle_cpu(world: PickerWorld) -> float:
    """What the picker takes of a core without requests: it asks servers how busy they are."""
    assert world.picker is not None
    before = cpu_s(world.picker.pid)
    await asyncio.sleep(1.0)
    return cpu_s(world.picker.pid) - before


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def beside(found: list[PickerCost]) -> list[PickerCost]:
    """With the latency that each arm adds to the first one's."""
    alone = {each.prompt: each.p50_ms for each in found if each.arm == next(iter(ARMS))}
    return [PickerCost(**{**asdict(each), "added_p50_ms": each.p50_ms - alone[each.prompt]}) for each in found]


async def main(requests: int) -> list[PickerCost]:
    """All arms."""
    found = [cost for arm, way in ARMS.items() for cost in await measure(arm, way, requests)]
    return beside(found)


def show(found: list[PickerCost]) -> None:
    """As a table."""
    print(f"{'arm':16}{'prompt':14}{'picker CPU':>12}{'Envoy CPU':>12}{'P50':>10}{'P99':>10}{'added P50':>12}  (ms)")
    for each in found:
        numbers = (each.picker_cpu_ms, each.envoy_cpu_ms, each.p50_ms, each.p99_ms, each.added_p50_ms)
        widths = (12, 12, 10, 10, 12)
        row = "".join(f"{value:{width}.2f}" for value, width in zip(numbers, widths, strict=True))
        print(f"{each.arm:16}{each.prompt:14}{row}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What an endpoint picker costs behind Envoy.")
    parser.add_argument("--requests", type=int, default=200, help="for each arm and length of prompt (default: 200)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    costs = asyncio.run(main(arguments.requests))
    if arguments.json:
        print(json.dumps([asdict(each) for each in costs]))
    else:
        show(costs)
