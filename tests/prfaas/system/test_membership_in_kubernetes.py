"""Pods of a double of Kubernetes, and a gateway that follows it: they come, are told to end, and the API server is lost."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from prfaas.cli import main
from tests.membership.kubernetes.servers import NAMESPACE, READ, SELECTOR, Cluster, DoubledApi
from tests.prfaas.system.test_membership import GATEWAY, Site, node, site, until

pytestmark = pytest.mark.e2e

SERVES_S = 25.0  # after its Pod has an address; less than 2 s on an idle machine


def in_kubernetes(api: DoubledApi) -> str:
    table = f'''
[gateway.membership.kubernetes]
selector = "{SELECTOR}"
namespaces = ["{NAMESPACE}"]
server = "{api.base}"
token_file = "token"
'''
    return GATEWAY.partition("[gateway.membership]")[0] + table


async def is_listed(here: Site, *names: str) -> bool:
    pages = [await here.page("/prfaas/console") for _ in range(8)]  # of all workers
    return all({each["node"] for each in page["nodes"]} == set(names) for page in pages)


async def is_frozen(here: Site) -> bool:
    return await here.metric("prfaas_membership_frozen_seconds", "kubernetes") > 0


async def is_fresh(here: Site) -> bool:
    return not await is_frozen(here)


def test_a_fleet_in_kubernetes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api = DoubledApi()
    (tmp_path / "token").write_text("gateway\n")
    (tmp_path / "token").chmod(0o600)

    async def scenario() -> None:
        cluster = Cluster(api)
        async with AsyncExitStack() as held:
            here = await held.enter_async_context(site(tmp_path, in_kubernetes(api)))
            nodes = {}
            for name in ("d0", "d1"):
                nodes[name] = await held.enter_async_context(node(tmp_path, name))
                host, _, port = nodes[name][1].rpartition(":")
                appeared_at = time.monotonic()
                await asyncio.to_thread(cluster.add, name, host, int(port))
                await here.are_ready(*nodes)
                took_s = time.monotonic() - appeared_at
                with capsys.disabled():
                    print(f"{name} serves {took_s:.2f} s after its Pod has an address")
                assert took_s < SERVES_S
            await here.answers(4, seed=1)

            under_way = asyncio.create_task(here.answers(16, seed=2))
            await asyncio.to_thread(cluster.end, "d1")  # as a kubelet does, which then ends the process
            await until(lambda: is_listed(here, "d0"))
            nodes["d1"][0].terminate()
            await here.answers(8, seed=3)
            await under_way
            await asyncio.to_thread(cluster.gone, "d1")

            config = str(tmp_path / "gateway.toml")
            assert main(["nodes", "list", "-c", config]) == 0
            listed = capsys.readouterr().out
            assert "d0" in listed
            assert "kubernetes" in listed
            assert main(["nodes", "add", "d9", "127.0.0.1:7009", "-c", config]) == 2
            assert "takes its nodes from Kubernetes" in capsys.readouterr().err

            await asyncio.to_thread(cluster.add, "x", "127.0.0.1", 7001, {"prfaas/role": "banana"})
            await until(lambda: here.metric("prfaas_members_left_out", "kubernetes"))

            await asyncio.to_thread(api.kill)
            await until(lambda: is_frozen(here))
            await here.answers(8, seed=4)
            assert await is_listed(here, "d0")
            assert main(["nodes", "list", "-c", config]) == 1
            assert "connection refused" in capsys.readouterr().out
            await asyncio.to_thread(api.start)
            await until(lambda: is_fresh(here))

    try:
        api.start()
        api.allow("gateway", READ)
        asyncio.run(scenario())
        api.allow("gateway", frozenset({("watch", "pods")}))
        assert main(["check", "-c", str(tmp_path / "gateway.toml")]) != 0
        assert "refuses to list pods in namespace llm (403)" in " ".join(capsys.readouterr().out.split())
    finally:
        api.close()
