"""The service as a process: killed while it leads, it comes back with what it remembers; told to stop, it ends in order."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import aiohttp
import msgspec
import tomli_w

from planner.service.status import Status
from tests.planner.conftest import CONFIGS
from tests.planner.service.worlds import LAW, PATIENCE_S, FakeGateway, fake_gateway, on_loop


def config_file(directory: Path, gateway: FakeGateway) -> Path:
    path = directory / "plan.toml"
    table = {
        "gateways": [gateway.url],
        "state_dir": str(directory / "plan"),
        "profile": str(CONFIGS / "profiles" / "internal-1t.json"),
        "pd_hardware": "h20x8",
        "prfaas_hardware": "h200x8",
        "egress_gbps": 100.0,
        "port": 0,
        "controller": {"tick_s": 0.05, "warmup_s": 0.0},
    }
    path.write_text(tomli_w.dumps({"plan": table}))
    return path


async def started(path: Path) -> tuple[Process, str]:
    """The process, and where it answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "planner", "serve", "-c", str(path), stdout=PIPE
    )
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip().rpartition("url=")[2]


@on_loop
async def test_a_service_that_is_killed_comes_back_with_its_plan(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, aiohttp.ClientSession() as http:

        async def status(url: str) -> Status:
            async with http.get(f"{url}/status") as answer:
                return msgspec.json.decode(await answer.read(), type=Status)

        path = config_file(tmp_path, gateway)
        process, url = await started(path)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (await status(url)).proposal is None:
                    gateway.ask(LAW[:500])
                    await asyncio.sleep(0.05)
            async with http.post(f"{url}/apply", json={"by": "ann"}) as answer:
                applied = msgspec.json.decode(await answer.read(), type=Status).in_force
            assert applied is not None
            process.send_signal(signal.SIGKILL)
            await process.wait()
            process, url = await started(path)
            again = (await status(url)).in_force
            assert again is not None
            assert (again.version, again.term, again.by) == (applied.version, applied.term + 1, "ann")
            process.send_signal(signal.SIGHUP)
            async with http.post(f"{url}/rollback", json={}) as answer:
                assert answer.status == 200
        finally:
            process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
