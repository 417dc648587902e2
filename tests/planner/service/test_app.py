"""What the service answers over HTTP, what it asks of callers, and the commands that call it."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from membership.etcd.settings import EtcdConfig
from planner.commands.cli import main
from planner.decisions.plans.live_plan import LivePlan
from planner.decisions.plans.offered import NodeReport
from planner.decisions.views import Role
from planner.errors import InputError, NothingSeen
from planner.service.announcement import AnnouncedLedger
from planner.service.app import MAX_HISTORIES, PlanEndpoints
from planner.service.config import ApplyMode
from planner.service.conversions import NodeConverter
from planner.service.etcd_store import PlansInEtcd
from planner.service.fleet import FollowingDesk
from planner.service.server import PlanService, leading, serve
from planner.service.status import Status
from planner.solve.control.ledger import Ledger, LedgerEntry
from planner.solve.control.wishes import ScaleWishes
from tests.planner.service.worlds import LAW, PATIENCE_S, SOON, FakeGateway, config_for, fake_gateway, on_loop
from transport.path.handshakes import OF_NETWORK


@asynccontextmanager
async def service(
    state_dir: Path, gateway: FakeGateway, converter: NodeConverter | None = None, **fields: Any
) -> AsyncIterator[PlanService]:
    config = config_for(state_dir, gateways=(gateway.url,), **fields)
    async with leading(replace(config, controller=replace(SOON, tick_s=0.01)), converter=converter) as found:
        yield found


async def proposed(found: PlanService, gateway: FakeGateway) -> None:
    """Waits until there is a proposal, and has it stay."""
    async with asyncio.timeout(PATIENCE_S):
        while not found.keeper.gateways.answers:  # noqa: ASYNC110 no event tells
            await asyncio.sleep(0.001)
        while found.keeper.ledger.proposal is None:
            gateway.ask(LAW)
            await asyncio.sleep(0.05)
    await found.keeper.pause("test")


async def command(*argv: str) -> int:
    """The exit code of `prfaas-plan`, run beside the service."""
    return await asyncio.to_thread(main, argv)


@on_loop
async def test_it_says_where_it_answers_over_ipv6(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, service(tmp_path, gateway, host="::1") as found:
        assert re.fullmatch(r"http://\[::1\]:\d+", found.url)
        async with aiohttp.ClientSession(found.url) as http, http.get("/health") as answer:
            assert answer.status == 200


@on_loop
async def test_a_plan_is_asked_for_and_changed(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, service(tmp_path, gateway) as found:
        await proposed(found, gateway)
        async with aiohttp.ClientSession(found.url) as http:
            async with http.get("/plan", params={"term": 0, "after": 0}) as answer:
                assert answer.status == 204
            waiting = asyncio.create_task(http.get("/plan", params={"wait_s": "60"}))
            async with http.post("/apply", json={"by": "ann"}) as answer:
                assert answer.status == 200
                status = msgspec.json.decode(await answer.read(), type=Status)
            assert status.in_force is not None
            assert status.in_force.by == "ann"
            plan = msgspec.json.decode(await (await waiting).read(), type=LivePlan)
            assert plan.place == (1, status.in_force.version)
            async with http.get("/health") as answer:
                assert (await answer.json())["term"] == 1
            async with http.get("/history?limit=1") as answer:
                assert [entry["change"] for entry in await answer.json()] == ["applied"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/apply", {"version": 99}, 409),
        ("POST", "/rollback", {}, 409),
        ("POST", "/apply", {"version": "x"}, 400),
        ("POST", "/apply", {"what": 1}, 400),
        ("POST", "/pause", None, 415),
        ("GET", "/plan?after=x", None, 400),
        ("GET", "/plan?after=-1", None, 400),
        ("GET", "/plan?wait_s=1000", None, 400),
        ("GET", "/plan?wait_s=nan", None, 400),
        ("GET", "/nothing", None, 404),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, method: str, path: str, body: Any, status: int) -> None:
    @on_loop
    async def asked() -> None:
        async with (
            fake_gateway() as gateway,
            service(tmp_path, gateway) as found,
            aiohttp.ClientSession(found.url) as http,
            http.request(method, path, json=body) as answer,
        ):
            assert answer.status == status

    asked()


@on_loop
async def test_scalers_are_told_how_many_nodes_are_wished(tmp_path: Path) -> None:
    async with (
        fake_gateway() as gateway,
        service(tmp_path, gateway, gateway_model="m") as found,
        aiohttp.ClientSession(found.url) as http,
        asyncio.timeout(PATIENCE_S),
    ):
        while (answer := await http.get("/scale")).status == 503:  # before the first look
            assert (await answer.json())["error"]
        told = msgspec.json.decode(await answer.read(), type=ScaleWishes)
        assert (told.model, list(told.sites)) == ("m", ["e", "w"])
        assert told.at > 1e9
        assert told.reason
        # One number by path, as KEDA's metrics-api reads it.
        assert (await answer.json())["sites"]["w"]["decode"]["wished"] == 1
        async with http.post("/scale", json={}) as refused:
            assert refused.status == 405


@on_loop
async def test_scalers_are_told_nothing_without_the_secret_or_by_a_service_that_follows(tmp_path: Path) -> None:
    token = tmp_path / "token"
    await asyncio.to_thread(token.write_text, "abc\n")
    async with (
        fake_gateway() as gateway,
        service(tmp_path / "s", gateway, token_file=token) as found,
        aiohttp.ClientSession(found.url) as http,
        http.get("/scale") as answer,
    ):
        assert answer.status == 401
    plans = PlansInEtcd(EtcdConfig(endpoints=("127.0.0.1:1",)), "a")
    with pytest.raises(NothingSeen, match="none leads now"):
        FollowingDesk(AnnouncedLedger(Ledger()), ApplyMode.ADVISORY, plans).wishes()
    plans.close()


@on_loop
async def test_no_answer_names_the_software(tmp_path: Path) -> None:
    async with (
        fake_gateway() as gateway,
        service(tmp_path, gateway) as found,
        aiohttp.ClientSession(found.url) as http,
    ):
        for path in ("/health", "/no-such-page"):
            async with http.get(path) as answer:
                assert "Server" not in answer.headers


@on_loop
async def test_the_secret_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    await asyncio.to_thread(token.write_text, "abc\n")
    async with fake_gateway() as gateway, service(tmp_path / "s", gateway, token_file=token) as found:
        async with aiohttp.ClientSession(found.url) as http:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer ab"}, 401),
                ({"Authorization": "Bearer abc"}, 200),
            ):
                async with http.get("/status", headers=headers) as answer:
                    assert answer.status == status
            async with http.get("/health") as answer:
                assert answer.status == 200
        port = int(found.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /status HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
        assert await command("show", "--url", found.url) == 1
        assert "secret" in capsys.readouterr().err
        assert await command("show", "--url", found.url, "--token-file", str(token)) == 0


@on_loop
async def test_a_crowd_in_clear_is_bounded_counted_and_keeps_no_known_caller_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    await asyncio.to_thread(token.write_text, "abc\n")
    shown = {"Authorization": "Bearer abc"}
    fields: dict[str, Any] = {"host": "0.0.0.0", "plain": True, "token_file": token}
    async with fake_gateway() as gateway, service(tmp_path / "s", gateway, **fields) as found:
        assert found.url.startswith("http://")
        port = int(found.url.rpartition(":")[2])
        here = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(here) as http, http.get("/status", headers=shown) as answer:
            assert (await answer.json())["turned_away"] == {}
        crowd = []
        for _ in range(OF_NETWORK + 20):
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.9.1", 0))
            crowd.append(writer)
        async with aiohttp.ClientSession(here) as http:
            async with asyncio.timeout(PATIENCE_S):
                crowded = 0
                while crowded < 20:
                    async with http.get("/status", headers=shown) as answer:
                        crowded = (await answer.json())["turned_away"].get("crowded", 0)
        assert await command("show", "--url", here, "--token-file", str(token)) == 0
        assert "connections that were turned away, crowded: " in capsys.readouterr().out
        for writer in crowd:
            writer.close()


@on_loop
async def test_commands_show_and_change_what_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_gateway() as gateway, service(tmp_path, gateway) as found:
        url = ("--url", found.url)
        await proposed(found, gateway)
        assert await command("show", *url) == 0
        shown = capsys.readouterr().out
        assert "leads in term 1, advisory, paused" in shown
        assert "as gateways are configured" in shown
        assert f"gateway {gateway.url}: follows no plan" in shown
        assert await command("diff", *url) == 1
        assert "threshold_tokens" in capsys.readouterr().out
        assert await command("diff", "--json", *url) == 1
        changes = json.loads(capsys.readouterr().out)["changes"]
        assert changes["threshold_tokens"]["current"] == 60_000
        assert await command("apply", "--version", "999", *url) == 1
        assert "version 999 is not proposed" in capsys.readouterr().err
        assert await command("apply", "--json", *url) == 0
        status = json.loads(capsys.readouterr().out)
        assert status["in_force"]["setting"]["threshold_tokens"] == changes["threshold_tokens"]["planned"]
        assert await command("rollback", *url) == 0
        assert "paused" in capsys.readouterr().out
        assert await command("resume", *url) == 0
        assert await command("pause", *url) == 0
        assert await command("history", *url) == 0
        history = capsys.readouterr().out
        for what in ("led", "proposed", "applied", "rolled_back", "resumed", "paused"):
            assert what in history
        assert await command("history", "--json", "--limit", "1", *url) == 0
        assert [entry["change"] for entry in json.loads(capsys.readouterr().out)] == ["paused"]


@on_loop
async def test_a_second_service_waits_and_goes_on_where_the_first_one_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas.plan")
    async with fake_gateway() as gateway:
        leads, over = asyncio.Event(), asyncio.Event()

        async def standby() -> tuple[int, int]:
            async with service(tmp_path, gateway) as second:
                leads.set()
                plan = await second.keeper.next_plan((0, 0), PATIENCE_S)
                assert plan is not None
                await over.wait()
                return plan.place

        async with service(tmp_path, gateway) as first:
            waiting = asyncio.create_task(standby())
            await proposed(first, gateway)
            await first.keeper.apply("ann")
            version = first.keeper.ledger.last_version
            assert not leads.is_set()
            assert f"another service leads with {tmp_path}" in caplog.text
        await leads.wait()
        over.set()
        assert await waiting == (2, version)


@on_loop
async def test_who_waits_for_his_turn_reads_the_list_of_gateways_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "prfaas.plan")
    lines: asyncio.Queue[str] = asyncio.Queue()
    async with fake_gateway() as gateway:
        config = replace(config_for(tmp_path, gateways=("http://127.0.0.1:1",)), controller=replace(SOON, tick_s=0.01))
        async with service(tmp_path, gateway):
            serving = asyncio.create_task(
                serve(config, lines.put_nowait, lambda: replace(config, gateways=(gateway.url,)))
            )  # fmt: skip
            await logged("another service leads", caplog)
            os.kill(os.getpid(), signal.SIGHUP)
            await logged("SIGHUP: 1 gateways", caplog)
            assert lines.empty()
        async with asyncio.timeout(PATIENCE_S):
            url = (await lines.get()).rpartition("url=")[2]
            async with aiohttp.ClientSession(url) as http:
                asked: Mapping[str, str] = {}
                while not asked:
                    async with http.get("/status") as answer:
                        asked = msgspec.json.decode(await answer.read(), type=Status).gateways
        assert set(asked) == {gateway.url}
        os.kill(os.getpid(), signal.SIGTERM)
        await serving


async def logged(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Waits until the log says so."""
    async with asyncio.timeout(PATIENCE_S):
        while text not in caplog.text:  # noqa: ASYNC110 no event tells
            await asyncio.sleep(0.001)


@on_loop
async def test_unforeseen_errors_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        async def convert(self, node: NodeReport, role: Role, plan: LivePlan) -> None:
            raise ZeroDivisionError

    async with (
        fake_gateway(threshold_tokens=19_684.0, num_prefill=6) as gateway,
        service(tmp_path, gateway, Broken(), conversions=True) as found,
    ):
        await proposed(found, gateway)
        await found.keeper.apply("ann")
        async with asyncio.timeout(PATIENCE_S):
            while not found.keeper.failures:  # noqa: ASYNC110 no event tells
                await asyncio.sleep(0.001)
        assert await command("show", "--url", found.url) == 0
        assert "unforeseen errors, while converting: 1; they are in the log" in capsys.readouterr().out


def test_no_service_is_an_error_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--url", "http://127.0.0.1:1"]) == 1
    assert "no plan service answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["diff", "--url", "http://127.0.0.1:1"]) == 2  # 1 says that there is a difference
    assert main(["show", "--url", "127.0.0.1"]) == 2
    assert main(["diff", "--current", "x"]) == 2


@pytest.mark.parametrize("url", ["http://127.0.0.1:1x", "http://127.0.0.1:1/ a"])
def test_an_address_that_is_none_is_an_error_that_says_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--url", url]) == 2
    assert f"error: --url {url}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.0 404 Not Found\r\n\r\n" + b'{"error": {"message": "no"}}'],
    ids=["no HTTP", "another API"],
)
@on_loop
async def test_who_answers_and_is_no_plan_service_is_named(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        assert await command("show", "--url", url) == 1
    assert f"error: {url} does not answer like a plan service" in capsys.readouterr().err


@on_loop
async def test_who_asks_writes_no_line_of_his_own_into_the_log(tmp_path: Path) -> None:
    async with fake_gateway() as gateway, service(tmp_path, gateway) as found:
        async with (
            aiohttp.ClientSession(found.url) as http,
            http.post("/pause", json={"by": "ann\n\x1b[31m é"}) as answer,
        ):
            assert answer.status == 200
        assert (await found.keeper.history(1))[0].by == "ann??[31m é"


@on_loop
async def test_a_user_without_a_name_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2_000_000_000)
    async with fake_gateway() as gateway, service(tmp_path, gateway) as found:
        assert await command("pause", "--url", found.url) == 0
        assert (await found.keeper.history(1))[0].by == "uid 2000000000"


@on_loop
async def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / f".ledger.json.{os.getpid()}").mkdir()  # in the way of what is written
    async with fake_gateway() as gateway:
        with pytest.raises(InputError, match=f"{tmp_path} cannot be written to: .*Is a directory"):
            async with service(tmp_path, gateway):
                pass


class SlowDesk(FollowingDesk):
    """Its log takes as long as a test says."""

    def __init__(self) -> None:
        store = PlansInEtcd(EtcdConfig(endpoints=("127.0.0.1:1",)), "a")
        super().__init__(AnnouncedLedger(Ledger()), ApplyMode.ADVISORY, store)
        self.asked = 0
        self.may_answer = asyncio.Event()

    async def history(self, limit: int) -> list[LedgerEntry]:
        self.asked += 1
        await self.may_answer.wait()
        return []


@on_loop
async def test_few_read_the_log_at_once(tmp_path: Path) -> None:
    """Each takes a thread, which waits while etcd is slow."""
    desk = SlowDesk()
    runner = web.AppRunner(PlanEndpoints(lambda: desk, "").app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
        reading = [asyncio.create_task(http.get("/history")) for _ in range(3 * MAX_HISTORIES)]
        done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        while len(done) < 2 * MAX_HISTORIES:
            assert desk.asked <= MAX_HISTORIES
            done, _ = await asyncio.wait(reading, timeout=0.05)
        assert {task.result().status for task in done} == {503}
        desk.may_answer.set()
        answers = await asyncio.gather(*reading)
        assert sorted(answer.status for answer in answers) == [200] * MAX_HISTORIES + [503] * 2 * MAX_HISTORIES
        async with http.get("/history") as answer:
            assert answer.status == 200
    await runner.cleanup()
