"""Nodes in a real etcd, and a gateway that follows it: they join, are killed, and etcd itself is lost."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prfaas.cli import main
from tests.membership.etcd.servers import RealEtcd, needed_binary
from tests.prfaas.system.test_membership import GATEWAY, NODE, Site, node, process, said, site, until

pytestmark = pytest.mark.e2e

SERVES_S = 25.0  # after its registration; 2 s on an idle machine
GONE_S = 90.0  # a lease of 30 s, and half of it again


def with_etcd(etcd: RealEtcd) -> str:
    table = f'etcd = {{ endpoints = ["{etcd.endpoint}"] }}\n'
    return GATEWAY.partition("file =")[0] + table


async def is_frozen(here: Site) -> bool:
    return await here.metric("prfaas_membership_frozen_seconds", "etcd") > 0


def test_a_fleet_in_etcd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    etcd = RealEtcd(tmp_path, needed_binary())
    node_file = f'etcd = {{ endpoints = ["{etcd.endpoint}"] }}\n'

    async def scenario() -> None:
        async with AsyncExitStack() as held:
            here = await held.enter_async_context(site(tmp_path, with_etcd(etcd)))
            await held.enter_async_context(node(tmp_path, "d0", node_file))
            await here.are_ready("d0")
            await here.answers(4, seed=1)

            second = await held.enter_async_context(
                process("pd_cluster", "-c", str(written(tmp_path, "d1", node_file)))
            )
            await said(second, r"node listening id=(\S+)")
            registered_at = time.monotonic()
            await said(second, r"node (ready)")
            ready_s = time.monotonic() - registered_at
            await here.are_ready("d0", "d1")
            took_s = time.monotonic() - registered_at
            with capsys.disabled():
                print(f"serves {took_s:.2f} s after it listens, {took_s - ready_s:.2f} s after its engine is ready")
            assert took_s < SERVES_S

            _, agent = await held.enter_async_context(node(tmp_path, "d2"))
            assert main(["nodes", "add", "d2", agent, "-c", str(tmp_path / "gateway.toml")]) == 0
            await here.are_ready("d0", "d1", "d2")
            assert main(["nodes", "remove", "d1", "-c", str(tmp_path / "gateway.toml")]) == 2
            assert "lists itself" in capsys.readouterr().err

            second.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            await here.answers(8, seed=2)
            async with asyncio.timeout(GONE_S):
                await until(lambda: is_listed(here, "d0", "d2"))
            with capsys.disabled():
                print(f"gone {time.monotonic() - killed_at:.1f} s after it was killed")

            etcd.kill()
            await until(lambda: is_frozen(here))
            await here.answers(8, seed=3)
            assert await is_listed(here, "d0", "d2")
            assert main(["nodes", "list", "-c", str(tmp_path / "gateway.toml")]) == 1
            assert "etcd does not answer" in capsys.readouterr().out
            await asyncio.to_thread(etcd.start)
            await until(lambda: is_fresh(here))
            assert main(["nodes", "remove", "d2", "-c", str(tmp_path / "gateway.toml")]) == 0
            await until(lambda: is_listed(here, "d0"))
            await here.answers(4, seed=4)

    async def is_listed(here: Site, *names: str) -> bool:
        pages = [await here.page("/prfaas/console") for _ in range(8)]  # of all workers
        return all({each["node"] for each in page["nodes"]} == set(names) for page in pages)

    async def is_fresh(here: Site) -> bool:
        return not await is_frozen(here)

    try:
        etcd.start()
        asyncio.run(scenario())
    finally:
        etcd.close()


def written(directory: Path, name: str, more: str) -> Path:
    path = directory / f"{name}.toml"
    path.write_text(NODE.format(name=name, run_dir=directory / "run") + more)
    return path
