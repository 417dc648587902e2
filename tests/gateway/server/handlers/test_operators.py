"""Pages that take long to make: the loop goes on meanwhile, and workers' counts are added up as the library adds them."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.telemetry.instruments import Children
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.page_thread import PageThread
from gateway.workers.process_scope import SingleProcess
from tests.gateway.worlds import PATIENCE_S, on_loop, world

WORKER = """
import sys
from pathlib import Path
from gateway.telemetry.metrics import Metrics, keep_in
directory, number = Path(sys.argv[1]), int(sys.argv[2])
keep_in(directory, number)
metrics = Metrics(directory)
for tenant in range(5):
    metrics._tenant_requests[f"t{tenant}", "200"].inc(tenant + number)
metrics._ttft["local",].observe(0.3 * (number + 1))
metrics.in_flight.set(2 + number)
metrics.connections["clients",].set(number)
metrics.upkeep.reloaded("ok")
"""


def test_counts_of_workers_are_added_up_as_the_library_does_it(tmp_path: Path) -> None:
    for number in range(3):
        subprocess.run([sys.executable, "-c", WORKER, str(tmp_path), str(number)], check=True, timeout=PATIENCE_S)
    theirs = CollectorRegistry()
    MultiProcessCollector(theirs, str(tmp_path))
    ours = Metrics(tmp_path).render().decode().splitlines()
    assert sorted(ours) == sorted(generate_latest(theirs).decode().splitlines())
    assert 'prfaas_tenant_requests_total{status="200",tenant="t4"} 15.0' in ours
    spent = Metrics(tmp_path).spent()
    assert [(each.tenant, each.requests) for each in spent] == [(f"t{n}", {"200": 3 * n + 3}) for n in range(5)]


def test_series_without_end_become_one() -> None:
    registry = CollectorRegistry()
    refused = Children(Counter("refused", "Refused", ["tenant", "status"], registry=registry), most=3)
    for number in range(9):
        refused[f"t{number}", "400"].inc()
    page = generate_latest(registry).decode()
    assert 'refused_total{status="other",tenant="other"} 6.0' in page
    assert page.count("refused_total{") == 4


@on_loop
async def test_the_loop_goes_on_and_who_asks_meanwhile_has_the_same_page() -> None:
    may_end, made = threading.Event(), []

    def make() -> int:
        made.append(1)
        assert may_end.wait(PATIENCE_S)
        return len(made)

    pages = PageThread()
    asked = [asyncio.ensure_future(pages.has(make)) for _ in range(3)]
    left = asyncio.ensure_future(pages.has(make))
    await asyncio.sleep(0)
    left.cancel()
    assert not any(each.done() for each in asked)
    may_end.set()
    assert await asyncio.gather(*asked) == [1, 1, 1]
    assert await pages.has(make) == 2
    await asyncio.gather(left, return_exceptions=True)


@on_loop
async def test_requests_are_served_while_pages_are_made() -> None:
    may_end = threading.Event()

    class SlowMetrics(Metrics):
        def render(self) -> bytes:
            assert may_end.wait(PATIENCE_S)
            return super().render()

    alone = SingleProcess()
    alone.metrics = SlowMetrics()
    async with world(seat=alone) as w:
        page = asyncio.ensure_future(w.http.get("/metrics"))
        assert (await w.complete("hello")).status == 200
        assert not page.done()
        may_end.set()
        assert (await page).status == 200
        (await page).release()
