"""The console: its files, what it asks for, and which roles may change anything by it."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.admin.console.static import FOLDER, POLICY, all_files
from gateway.auth.keyring import digest_of
from gateway.cluster.drained_links import SharedDrainedLinks
from gateway.config.classes import ClassConfig
from gateway.config.plan import PlanConfig
from gateway.config.tenants import TenantConfig
from tests.gateway.admission.test_slo import LONG
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import Deployment, on_loop, until, world
from tests.transport.path.ports import free_port
from transport.control.proto import node_pb2 as pb

FETCHED = re.compile(r"""(?:src|href)="(console/[^"]+)"|from "\./([^"]+)\"""")


async def snapshot(w: Deployment, since: int = 0) -> dict[str, Any]:
    async with w.http.get(f"/prfaas/console?since={since}") as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


@on_memory_loop
async def test_the_page_and_every_file_that_it_asks_for_is_served_from_here() -> None:
    async with pipeline() as w:
        async with w.http.get("/console") as answer:
            page = await answer.text()
            assert answer.content_type == "text/html"
            assert answer.headers["Content-Security-Policy"] == POLICY
        assert "'unsafe" not in POLICY
        for name, file in all_files().items():
            async with w.http.get(f"/console/{name}") as answer:
                assert answer.status == 200
                assert answer.headers["Content-Security-Policy"] == POLICY
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert await answer.read() == file.body
                tag = answer.headers["ETag"]
            async with w.http.get(f"/console/{name}", headers={"If-None-Match": tag}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
        asked = {f"/{whole}" for whole, _ in FETCHED.findall(page) if whole}
        for path in FOLDER.glob("*.js"):
            asked |= {f"/console/{part}" for _, part in FETCHED.findall(path.read_text()) if part}
        assert {path.removeprefix("/console/") for path in asked} <= set(all_files())
        assert "://" not in page
        async with w.http.get("/console/../snapshot.py") as answer:
            assert answer.status == 404


def test_the_licence_of_what_is_not_ours_lies_beside_it() -> None:
    for file in FOLDER.glob("vendor/*/*.js"):
        assert "Permission is hereby granted" in (file.parent / "LICENSE").read_text()


@on_memory_loop
async def test_a_snapshot_has_what_the_views_show() -> None:
    classes = {"interactive": ClassConfig(ttft_s=2.0, tbt_ms=50.0, priority=3)}
    async with pipeline(remote=2, local=1, decode=2, classes=classes) as w:
        assert (await w.complete(LONG)).status == 200
        assert (await w.complete("hello there")).status == 200
        await w.idle()
        found = await snapshot(w)
        assert [record["reason"] for record in found["requests"]] == ["long", "short"]
        assert found["last_seq"] == 2
        assert {each["node"]: (each["cluster"], each["role"], each["state"]) for each in found["nodes"]} == {
            "r0": ("east", "prefill", "ready"),
            "r1": ("east", "prefill", "ready"),
            "p0": ("west", "prefill", "ready"),
            "d0": ("west", "decode", "ready"),
            "d1": ("west", "decode", "ready"),
        }
        assert [(each["name"], each["ttft_s"], each["tbt_s"]) for each in found["classes"]] == [
            ("default", None, None),
            ("interactive", 2.0, 0.05),
        ]
        assert [group["name"] for group in found["groups"]] == ["FullAttention 0", "LinearState 1"]
        assert (found["threshold_tokens"], found["plan"], found["has_plan_service"]) == (100, None, False)
        (link,) = found["links"]
        assert (link["status"]["source"], link["status"]["destination"]) == ("east", "west")
        assert [sender["breaker"] for sender in link["senders"]] == ["closed", "closed"]
        assert abs(found["clock_s"] - found["requests"][0]["arrived_s"]) < 60
        later = await snapshot(w, since=2)
        assert (later["requests"], later["last_seq"]) == ([], 2)


@on_memory_loop
async def test_who_has_seen_more_than_a_gateway_that_was_started_again_hears_of_all_that_it_served() -> None:
    async with pipeline(remote=1, local=1, decode=1) as w:
        assert (await w.complete(LONG)).status == 200
        await w.idle()
        found = await snapshot(w, since=7)  # a number from before the restart
        assert ([record["seq"] for record in found["requests"]], found["last_seq"]) == ([1], 1)
        for page in ("requests", "flows"):
            async with w.http.get(f"/prfaas/{page}?since=7") as answer:
                assert [json.loads(line)["seq"] for line in (await answer.text()).splitlines()] == [1]


@on_memory_loop
async def test_a_busy_link_and_then_its_failure_show() -> None:
    async with pipeline(decode=1) as w:
        (remote,) = w.nodes.remote
        remote.load = pb.Load(
            egress_bytes_total=10**9,
            links=[
                pb.Link(
                    peer="west", available_bytes_per_s=1e8, utilisation=0.9, rtt_s=0.02, min_rtt_s=0.01,
                    retransmit_ratio=0.05, queued_bytes=10**8, congested=True,
                )
            ],
        )  # fmt: skip
        await until(lambda: w.links.status()[0].congested)
        (link,) = (await snapshot(w))["links"]
        assert (link["status"]["utilisation"], link["retransmit_ratio"]) == (0.9, 0.05)
        assert 0.4 < link["pressure"] <= 1
        assert link["drain_s"] == pytest.approx(1.0)
        remote.load = pb.Load()
        remote.script.path_is_down = True
        await until(lambda: not w.links.status()[0].congested)
        assert (await w.complete(LONG)).status == 200
        (link,) = (await snapshot(w))["links"]
        assert (link["status"]["up"], [each["breaker"] for each in link["senders"]]) == (False, ["open"])


@on_loop
async def test_with_a_port_of_their_own_operators_have_the_console_there_alone() -> None:
    async with (
        world(metrics_port=free_port()) as w,
        aiohttp.ClientSession(w.gateway.metrics_url.removesuffix("/metrics")) as operators,
    ):
        for path in ("/console", "/prfaas/console", "/prfaas/plan", "/console/app.js"):
            async with w.http.get(path) as answer:
                assert answer.status == 404
            async with operators.get(path) as answer:
                assert answer.status == 200
        async with w.http.post("/prfaas/explain", json={}) as answer:
            assert answer.status == 404
        async with operators.get("/prfaas/console") as answer:
            assert (await answer.json())["serves_clients"] is False


@on_memory_loop
async def test_with_tenants_the_console_is_for_operators() -> None:
    keys = {"tenants": {"acme": TenantConfig(keys=(digest_of("mine"),))}, "operator_keys": (digest_of("theirs"),)}
    paths = ("/console", "/console/app.js", "/prfaas/console", "/prfaas/flows", "/prfaas/plan", "/prfaas/links")
    async with pipeline(**keys) as w:
        for path in paths:
            for shown in (None, "mine"):
                headers = {"Authorization": f"Bearer {shown}"} if shown else {}
                async with w.http.get(path, headers=headers) as answer:
                    assert answer.status in (401, 403)
            for auth in (
                {"Authorization": "Bearer theirs"},
                {"Authorization": aiohttp.encode_basic_auth("me", "theirs")},
            ):
                async with w.http.get(path, headers=auth) as answer:
                    assert answer.status == 200
        operator = {"Authorization": "Bearer theirs"}
        async with w.http.get("/prfaas/console", headers=operator) as answer:
            assert (await answer.json())["tenants"] == ["acme"]
        body = {"model": "scripted", "prompt": "hello there"}
        async with w.http.post("/prfaas/explain?tenant=acme", json=body, headers=operator) as answer:
            assert (await answer.json())["decision"]["route"]["reason"] == "short"
        for path in ("/prfaas/explain", "/prfaas/links", "/prfaas/plan"):
            async with w.http.post(path, json=body, headers={"Authorization": "Bearer mine"}) as answer:
                assert answer.status in (401, 403)


class PlanService:
    """As much of one as the console asks."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.url = ""

    async def status(self, http: web.Request) -> web.Response:
        assert http.headers["Authorization"] == "Bearer secret"
        return web.json_response({"term": 1, "mode": "advisory"})

    async def history(self, http: web.Request) -> web.Response:
        return web.json_response([{"at": 1.0, "change": "proposed"}])

    async def change(self, http: web.Request) -> web.Response:
        self.asked.append((http.path, await http.json()))
        if http.path == "/rollback":
            return web.json_response({"error": "there is nothing to go back to"}, status=409)
        return web.json_response({"term": 1, "mode": "applied"})

    async def plan(self, http: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response(status=204)

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/status", self.status)
        app.router.add_get("/history", self.history)
        app.router.add_get("/plan", self.plan)
        for name in ("apply", "rollback", "pause", "resume"):
            app.router.add_post(f"/{name}", self.change)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*runner.addresses[0][:2])
        return runner


@on_loop
async def test_plans_are_seen_and_changed_through_the_gateway_with_its_secret(tmp_path: Path) -> None:
    service, token = PlanService(), tmp_path / "token"
    token.write_text("secret\n")
    runner = await service.start()
    try:
        async with world(plan=PlanConfig(url=service.url, token_file=token)) as w:
            async with w.http.get("/prfaas/plan") as answer:
                found = await answer.json()
            assert (found["configured"], found["status"]["mode"], len(found["history"])) == (True, "advisory", 1)
            async with w.http.post("/prfaas/plan", json={"change": "apply", "version": 3}) as answer:
                assert (answer.status, (await answer.json())["mode"]) == (200, "applied")
            assert service.asked == [("/apply", {"by": "console", "version": 3})]
            async with w.http.post("/prfaas/plan", json={"change": "rollback"}) as answer:
                assert answer.status == 409
                assert (await answer.json())["error"]["message"] == "there is nothing to go back to"
            async with w.http.post("/prfaas/plan", json={"change": "explode"}) as answer:
                assert answer.status == 400
            service.asked.clear()
            body = json.dumps({"change": "apply"})
            for headers, status in (
                ({"Content-Type": "text/plain"}, 415),
                ({"Content-Type": "application/json", "Origin": "http://evil.example"}, 403),
                (
                    {"Content-Type": "application/json", "Origin": "http://evil.example", "Host": "evil.example"},
                    403,
                ),  # a stranger's name that leads here
            ):
                async with w.http.post("/prfaas/plan", data=body, headers=headers) as answer:
                    assert answer.status == status
            assert not service.asked
    finally:
        await runner.cleanup()


@on_memory_loop
async def test_who_shows_an_operators_key_may_change_things_at_any_name_of_the_gateway() -> None:
    async with pipeline(operator_keys=(digest_of("sk-operator"),)) as w:
        change = {"source": "east", "destination": "west", "drained": True}
        at = {"Host": "gateway.example:443", "Origin": "https://gateway.example:443"}
        shown = base64.b64encode(b"anybody:sk-operator").decode()
        for authorisation, origin, status in (
            (f"Basic {shown}", at["Origin"], 200),
            ("Bearer sk-operator", at["Origin"], 200),
            ("Bearer sk-other", at["Origin"], 401),
            (f"Basic {shown}", "https://evil.example", 403),
        ):
            headers = at | {"Authorization": authorisation, "Origin": origin}
            async with w.http.post("/prfaas/links", json=change, headers=headers) as answer:
                assert answer.status == status


@on_memory_loop
async def test_a_change_that_comes_in_pieces_is_read_as_a_whole() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"source": "east", "destination"'
        yield b': "west", "drained": true}'

    async with pipeline() as w:
        headers = {"Content-Type": "application/json"}
        async with w.http.post("/prfaas/links", data=pieces(), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        async with w.http.post("/prfaas/links", data=b" " * 5000, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "request_too_large")


@on_memory_loop
async def test_nothing_new_goes_over_a_drained_link_until_it_is_used_again() -> None:
    async with pipeline(decode=1) as w:
        east_west = {"source": "east", "destination": "west"}
        async with w.http.post("/prfaas/links", json={**east_west, "drained": True}) as answer:
            (link,) = (await answer.json())["data"]
            assert (link["drained"], link["up"]) == (True, False)
        assert (await w.complete(LONG)).headers["x-prfaas-route"].endswith("reason=link_down")
        (link,) = (await snapshot(w))["links"]
        assert (link["status"]["drained"], [each["breaker"] for each in link["senders"]]) == (True, ["closed"])
        nodes = {node.id: node for node in w.clusters.nodes}
        assert not w.links.is_up(nodes["r0"], nodes["d0"])
        assert not w.links.is_up(nodes["d0"], nodes["r0"])
        assert w.links.is_up(nodes["p0"], nodes["d0"])
        async with w.http.post("/prfaas/links", json={**east_west, "drained": False}) as answer:
            assert (await answer.json())["data"][0]["up"]
        assert (await w.complete(f"another {LONG}")).headers["x-prfaas-route"].startswith("remote;")
        for body, status in (
            ({"source": "nowhere", "destination": "west", "drained": True}, 404),
            ({**east_west, "drained": "yes"}, 400),
        ):
            async with w.http.post("/prfaas/links", json=body) as answer:
                assert answer.status == status
        async with w.http.post(
            "/prfaas/links", json={**east_west, "drained": True}, headers={"Origin": "http://x.y"}
        ) as answer:
            assert answer.status == 403


def test_workers_tell_each_other_which_links_are_drained(tmp_path: Path) -> None:
    first, second = (SharedDrainedLinks(tmp_path / "drained") for _ in range(2))
    assert first.links() == frozenset()
    first.set(("east/1", "a west"), True)
    second.set(("north", "south"), True)
    assert first.links() == second.links() == {("east/1", "a west"), ("north", "south")}
    second.set(("east/1", "a west"), False)
    assert first.links() == {("north", "south")}


def test_links_stay_drained_when_their_folder_is_gone_or_cannot_be_read(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "drained"
    drained = SharedDrainedLinks(folder)
    drained.set(("east", "west"), True)
    (folder / "notes").touch()
    assert drained.links() == {("east", "west")}
    shutil.rmtree(folder)
    assert drained.links() == drained.links() == {("east", "west")}
    folder.touch()
    assert drained.links() == {("east", "west")}
    with pytest.raises(OSError, match="exists"):
        drained.set(("north", "south"), True)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    folder.unlink()
    drained.set(("north", "south"), True)
    assert SharedDrainedLinks(folder).links() == drained.links() == {("east", "west"), ("north", "south")}
    drained.set(("east", "west"), False)
    drained.set(("north", "south"), False)
    assert drained.links() == frozenset()


@on_memory_loop
async def test_without_a_plan_service_that_is_said() -> None:
    async with pipeline() as w:
        async with w.http.get("/prfaas/plan") as answer:
            assert await answer.json() == {"configured": False, "url": "", "status": None, "history": None}
        async with w.http.post("/prfaas/plan", json={"change": "apply"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (409, "no_plan_service")


@on_loop
async def test_a_plan_service_that_does_not_answer_is_said_to_be_away() -> None:
    async with world(plan=PlanConfig(url="http://127.0.0.1:1")) as w, w.http.get("/prfaas/plan") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (502, "plan_service")


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the console's own code with")
def test_what_the_page_makes_of_snapshots(tmp_path: Path) -> None:
    for name in ("model", "numbers"):
        (tmp_path / f"{name}.mjs").write_text((FOLDER / f"{name}.js").read_text())
    (tmp_path / "test.mjs").write_text((Path(__file__).parent / "console_model.mjs").read_text())
    done = subprocess.run(["node", "--test", "test.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@on_memory_loop
async def test_a_drained_link_stays_drained_when_the_gateway_is_started_anew(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "drained"
    east_west = {"source": "east", "destination": "west"}
    drain = {**east_west, "drained": True}
    async with pipeline(drained_dir=folder) as w, w.http.post("/prfaas/links", json=drain) as answer:
        assert answer.status == 200
    async with pipeline(drained_dir=folder) as w:
        assert (await w.complete(LONG)).status == 200
        assert [each["reason"] for each in await w.records()] == ["link_down"]
        async with w.http.post("/prfaas/links", json={**east_west, "drained": False}) as answer:
            assert answer.status == 200
    assert list(folder.iterdir()) == []
