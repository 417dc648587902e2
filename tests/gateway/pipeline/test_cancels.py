"""A client that leaves frees both legs and the reservation, wherever its request is.

`python -m tests.gateway.pipeline.test_cancels` says how soon. Client, gateway and nodes are one process, which does nothing
else: the CPU that it takes is the time that it would take on a machine that does nothing else.
"""

import asyncio
import time

import pytest

from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import World, on_loop, until, world

LONG = "the quick brown fox jumps over the lazy dog " * 40
CANCELS = 300
STEPS = 25  # of the loop; a request takes fewer


async def freed_s(w: World, in_stream: bool) -> tuple[float, float]:
    """Seconds, and those of CPU, from a client's leaving until no node does or holds anything for it."""
    gate = asyncio.Event()
    for node in w.nodes.nodes:
        node.script.prefill_gate = None if in_stream else gate
        node.script.word_interval_s = 60.0 if in_stream else 0.0
    body = {"model": "scripted", "prompt": LONG, "stream": True}
    asking = asyncio.create_task(w.http.post("/v1/completions", json=body))
    if in_stream:
        response = await asking
        await response.content.readany()
        left_at, cpu_at = time.perf_counter(), time.process_time()
        response.close()
    else:
        await until(lambda: sum(node.running for node in w.nodes.nodes) == 2)
        left_at, cpu_at = time.perf_counter(), time.process_time()
        asking.cancel()
        await asyncio.wait([asking])
    while w.nodes.leftovers():  # noqa: ASYNC110 measured to the step of the loop
        await asyncio.sleep(0)
    return time.perf_counter() - left_at, time.process_time() - cpu_at


@on_loop
async def test_a_client_that_leaves_frees_both_legs() -> None:
    async with world() as w:
        for in_stream in (False, True):
            for _ in range(5):
                await freed_s(w, in_stream)


@on_memory_loop
@pytest.mark.parametrize("fault", ["", "prefill drop", "decode 500 x", "reserve RESOURCE_EXHAUSTED"])
async def test_at_whatever_step_a_client_leaves_nothing_stays_and_its_request_is_counted_once(fault: str) -> None:
    stage, _, answer = fault.partition(" ")
    async with pipeline() as w:
        for steps in range(STEPS):
            for node in w.nodes.nodes if stage else ():
                setattr(node.script, stage, [answer])
            asking = asyncio.create_task(w.complete(f"{steps} {LONG}", stream=True))
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            await w.settled()
            await w.idle()
            nodes = w.clusters.nodes
            left = [(node.id, node.pending_requests, node.pending_tokens, len(node.underway)) for node in nodes]
            assert left == [(node.id, 0, 0, 0) for node in nodes], steps
        records = await w.records()
        assert {record["status"] for record in records} >= {499}
        assert len({record["id"] for record in records}) == len(records)
        page = await w.metrics()
        counted = [float(line.split()[-1]) for line in page.splitlines() if line.startswith("prfaas_requests_total{")]
        assert sum(counted) == len(records)
        assert "prfaas_requests_in_flight 0.0" in page
        assert "prfaas_requests_waiting 0.0" in page


async def main() -> None:
    for in_stream in (False, True):
        async with world() as w:
            took = [await freed_s(w, in_stream) for _ in range(CANCELS)]
        where = "in its stream" if in_stream else "during its prefill"
        for what, seconds in zip(("time", "CPU"), zip(*took, strict=True), strict=True):
            ordered = sorted(seconds)
            median_ms, p99_ms = (1e3 * ordered[int(share * len(ordered))] for share in (0.5, 0.99))
            print(f"{where}, {what}: median {median_ms:.1f} ms, P99 {p99_ms:.1f} ms, of {CANCELS} cancels")


if __name__ == "__main__":
    asyncio.run(main())
