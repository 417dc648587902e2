"""A real Prometheus scrapes a real system by the rules that we ship: a dead engine fires some, its successor clears them."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from tests.transport.path.ports import free_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "prometheus"
PROMETHEUS = shutil.which("prometheus") or str(ROOT / ".prometheus" / "usr" / "bin" / "prometheus")

EXPECTED = {"PrfaasNodeNotReady", "PrfaasNoDecodeNode"}
"""Of a dead engine. Without their patience others fire, too: the first predictions are wrong."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not shutil.which(PROMETHEUS), reason="no prometheus: `make test-deploy` fetches one"),
]


@contextmanager
def prometheus(folder: Path, jobs: dict[str, list[str]]) -> Iterator[str]:
    """One that scrapes these targets every second, by our rules without their patience; its URL."""
    document = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for scrape in document["scrape_configs"]:
        scrape["static_configs"] = [{"targets": jobs[scrape["job_name"]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document))
    (folder / "rules.yml").write_text(re.sub(r"\n +for: \w+", "", (DEPLOY / "rules.yml").read_text()))
    port = free_port()
    command = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


async def asked(http: aiohttp.ClientSession, url: str, path: str) -> dict[str, Any]:
    """What Prometheus' API says; nothing while it starts."""
    try:
        async with http.get(f"{url}/api/v1/{path}") as answer:
            data: dict[str, Any] = (await answer.json())["data"] if answer.status == 200 else {}
            return data
    except aiohttp.ClientConnectionError:
        return {}


async def firing(http: aiohttp.ClientSession, url: str) -> set[str]:
    alerts = (await asked(http, url, "alerts")).get("alerts", [])
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def test_what_we_ship_works_with_a_real_one(models: Models, tmp_path: Path) -> None:
    model = models("kimi_linear")
    document = topology_document(model, threshold=300, integrity="checksum")  # our file is for ports in clear
    with Bench(document, model, tmp_path) as bench:
        jobs = {
            "prfaas-gateway": [bench.system.api_url.removeprefix("http://")],
            "prfaas-node": [node.metrics_url.removeprefix("http://") for node in bench.system.nodes.values()],
        }
        with prometheus(tmp_path, jobs) as url:
            bench.run(_scenario(bench, url, sum(map(len, jobs.values()))), 180.0)


async def _scenario(bench: Bench, url: str, num_targets: int) -> None:
    http = bench.session

    async def all_are_up() -> bool:
        targets = (await asked(http, url, "targets")).get("activeTargets", [])
        return [target["health"] for target in targets] == ["up"] * num_targets

    fired: set[str] = set()

    async def fires() -> bool:
        fired.update(await firing(http, url))
        return fired >= EXPECTED

    async def is_calm() -> bool:
        return not await firing(http, url) & EXPECTED

    await bench.wait_until(all_are_up)
    rules = [rule for group in (await asked(http, url, "rules"))["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    await bench.generate(bench.prompt(400, seed=3), 4)
    await bench.wait_until(is_calm)
    os.kill((await bench.describe("decode0")).engine_pid, signal.SIGKILL)
    await bench.wait_until(fires)
    await bench.wait_until(is_calm)
