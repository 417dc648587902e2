import asyncio
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gateway.auth.keyring import digest_of
from gateway.config.models import ModelTable
from gateway.config.tenants import TenantConfig
from membership.lines import Line
from prfaas.cli import main
from prfaas.commands.asking import GatewayClient
from prfaas.commands.flows import FlowFilter, follow, line
from prfaas.commands.top import Screen, once, rate, watch
from prfaas.errors import AskError
from tests.gateway.admission.test_slo import LONG
from tests.gateway.layouts import LAYOUT
from tests.gateway.worlds import on_loop, until, world
from tests.prompts.builders import text_tokenizer
from transport.control.proto import node_pb2 as pb


def shown(page: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=180).print(page)
    return text.getvalue()


@on_loop
async def test_a_page_has_links_clusters_and_nodes_and_a_link_that_fails_shows() -> None:
    async with world(remote=1, local=1, decode=1) as w:
        (remote,) = w.nodes.remote
        remote.load = pb.Load(links=[pb.Link(peer="west", available_bytes_per_s=2e6, utilisation=0.7)])
        await until(lambda: w.gateway.links.status()[0].utilisation > 0)
        gateway = GatewayClient(w.gateway.url)
        page = shown(await asyncio.to_thread(once, gateway))
        assert "scripted  in flight 0 of 1024, in line 0  t = 100, no plan" in page
        (way,) = [line for line in page.splitlines() if line.startswith("east → west")]
        assert way.split()[3:8] == ["closed", "70%", "busy", "1.4", "MB/s"]
        assert all(any(line.startswith(f"{node} ") for line in page.splitlines()) for node in ("r0", "p0", "d0"))
        remote.load, remote.script.path_is_down = pb.Load(), True
        await w.complete(LONG)
        await w.idle()
        page = shown(await asyncio.to_thread(once, gateway))
        (way,) = [line for line in page.splitlines() if line.startswith("east → west")]
        assert "DOWN" in way
        assert "open (1 of 1)" in way
        assert "last minute: 1 requests, 0% remote" in page


@on_loop
async def test_a_sender_that_its_budget_holds_back_is_shown_to_carry_what_that_allows() -> None:
    async with world(remote=1) as w:
        w.nodes.remote[0].load = pb.Load(links=[pb.Link(peer="west", budget_bytes_per_s=2e6, utilisation=0.7)])
        await until(lambda: w.gateway.links.status()[0].utilisation > 0)
        page = shown(await asyncio.to_thread(once, GatewayClient(w.gateway.url)))
        (way,) = [line for line in page.splitlines() if line.startswith("east → west")]
        assert "1.4 MB/s" in way


@on_loop
async def test_described_lines_have_a_table_of_their_own() -> None:
    line = Line(
        source="east", destination="west", name="carrier-a", capacity_gbps=0.016, price_per_gb=0.02, shared_by=()
    )
    async with world(remote=1, local=1, decode=1, lines=(line,)) as w:
        (remote,) = w.nodes.remote
        remote.load = pb.Load(links=[pb.Link(peer="west", available_bytes_per_s=2e6, utilisation=0.85)])
        await until(lambda: w.gateway.links.status()[0].utilisation > 0)
        page = shown(await asyncio.to_thread(once, GatewayClient(w.gateway.url)))
        (row,) = [each for each in page.splitlines() if each.startswith("carrier-a")]
        assert row.split() == [
            "carrier-a",
            "east",
            "→",
            "west",
            "85%",
            "CRITICAL",
            "1.7",
            "MB/s",
            "2.0",
            "MB/s",
            "89",
            "–",
            "–",
        ]
        told = [
            each for each in (await w.metrics()).splitlines() if each.startswith("prfaas_described_line_used_ratio{")
        ]
        assert [each.rpartition(" ")[2] for each in told] == ["0.85"]


@on_loop
async def test_flows_are_followed_from_where_the_last_answer_ended() -> None:
    async with world(decode=1) as w:
        for i in range(2):
            await w.complete(f"{i} {LONG}")
        await w.complete("hello there")
        await w.idle()
        gateway = GatewayClient(w.gateway.url)

        def seen(wanted: FlowFilter) -> list[dict[str, Any]]:
            return list(follow(gateway, wanted, once=True))

        crossing = await asyncio.to_thread(seen, FlowFilter())
        assert [flow["source"] for flow in crossing] == ["r0", "r0"]
        assert len(await asyncio.to_thread(seen, FlowFilter(all_of_them=True))) == 3
        assert len(await asyncio.to_thread(seen, FlowFilter(link=("west", "west")))) == 1
        assert not await asyncio.to_thread(seen, FlowFilter(kinds=frozenset({"move"})))
        assert "east → west" in line(crossing[0])
        assert "request" in line(crossing[0])
        assert "long · req-" in line(crossing[0])


def test_following_asks_after_the_last_number() -> None:
    asked: list[int] = []

    class Told:
        def lines(self, path: str, since: int) -> list[dict[str, Any]]:
            asked.append(since)
            flow = {"source_cluster": "a", "destination_cluster": "b", "kind": "request"}
            return [{**flow, "seq": since + 1}, {**flow, "seq": since + 2}]

    found: Iterator[dict[str, Any]] = follow(Told(), FlowFilter(), once=False, sleep=lambda _: None)  # type: ignore[arg-type]
    assert [next(found)["seq"] for _ in range(5)] == [1, 2, 3, 4, 5]
    assert asked == [0, 2, 4]


def test_following_goes_on_when_the_gateway_has_started_again() -> None:
    flow = {"source_cluster": "a", "destination_cluster": "b", "kind": "request"}
    away = AskError("no gateway answers")
    answers: list[Any] = [[{**flow, "seq": 7}], away, away, AskError("it says 503"), [{**flow, "seq": 1}]]

    class Told:
        url = "http://gateway"

        def lines(self, path: str, since: int) -> list[dict[str, Any]]:
            answer = answers.pop(0)
            if isinstance(answer, AskError):
                raise answer
            return answer

    told: list[str] = []
    found: Iterator[dict[str, Any]] = follow(Told(), FlowFilter(), once=False, sleep=lambda _: None, tell=told.append)  # type: ignore[arg-type]
    assert [next(found)["seq"] for _ in range(2)] == [7, 1]
    assert told == [
        "no gateway answers; it is asked again every 1 s",
        "it says 503; it is asked again every 1 s",
        "http://gateway answers again",
    ]


def test_following_needs_a_gateway_at_first() -> None:
    class Away:
        def lines(self, path: str, since: int) -> list[dict[str, Any]]:
            raise AskError("no gateway answers")

    with pytest.raises(AskError):
        next(follow(Away(), FlowFilter(), once=False, sleep=lambda _: None))  # type: ignore[arg-type]


SNAPSHOT: dict[str, Any] = {
    "boot": "a", "at": 10.0, "clock_s": 5.0, "model": "m", "workers": {"ready": 2}, "in_flight": 0, "max_in_flight": 9,
    "waiting": 0, "threshold_tokens": 7.0, "plan": {"version": 3}, "links": [], "last_seq": 0, "requests": [],
}  # fmt: skip


def node(name: str, **fields: Any) -> dict[str, Any]:
    known = {"node": name, "cluster": "east", "kind": "prfaas", "role": "prefill", "state": "ready", "egress_bytes": 0,
        "running": 0, "waiting": 0, "slots": 1, "queued_tokens": 0, "pending_tokens": 0, "step_s": 0.0,
        "pages_total": 0, "pages_free": 0, "pages_evictable": 0}  # fmt: skip
    return known | fields


def test_rates_are_differences_and_whoever_needs_looking_at_comes_first() -> None:
    screen = Screen()
    screen.take({**SNAPSHOT, "nodes": [node("r0", egress_bytes=1000)]})
    nodes = [node("r0", egress_bytes=5000), *(node(f"n{i}") for i in range(5)), node("gone", state="down")]
    screen.take({**SNAPSHOT, "at": 12.0, "nodes": nodes})
    page = shown(screen.page(max_nodes=3))
    assert "2.0 kB/s" in page
    assert "m, 2 workers" in page
    assert "plan 3" in page
    lines = page.splitlines()
    assert lines[lines.index(next(each for each in lines if each.startswith("node "))) + 1].startswith("gone")
    assert "… and 4 more" in page
    assert rate(None) == "–"


def test_a_gateway_that_goes_away_is_asked_again() -> None:
    answers: list[Any] = [{**SNAPSHOT, "nodes": []}, AskError("no gateway answers"), {**SNAPSHOT, "nodes": []}]

    class Told:
        def get(self, path: str, since: int = 0, top: int = 0) -> Any:
            if path == "/prfaas/usage":
                raise AskError(f"the {top} first tenants are not told now")
            answer = answers.pop(0)
            if isinstance(answer, AskError):
                raise answer
            return answer

    def stop_at_the_end(_: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    text = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        watch(Told(), Console(file=text, force_terminal=True, width=160, height=40), 1.0, stop_at_the_end)  # type: ignore[arg-type]
    assert "no gateway answers" in text.getvalue()


@on_loop
async def test_the_commands_print_what_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    async with world(decode=1) as w:
        await w.complete(LONG)
        await w.idle()
        assert await asyncio.to_thread(main, ["flows", "-u", w.gateway.url, "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kind"] == "request"
        assert await asyncio.to_thread(main, ["top", "-u", w.gateway.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == "scripted"
        assert await asyncio.to_thread(main, ["top", "-u", w.gateway.url, "--once"]) == 0
        assert "east → west" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["drain", "east:west", "-u", w.gateway.url]) == 0
        assert capsys.readouterr().out == "east → west: drained\n"
        assert await asyncio.to_thread(main, ["top", "-u", w.gateway.url, "--once"]) == 0
        assert "0% drained" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["drain", "east:west", "--undo", "-u", w.gateway.url, "--json"]) == 0
        assert [link["up"] for link in json.loads(capsys.readouterr().out)] == [True]
        assert await asyncio.to_thread(main, ["drain", "east:nowhere", "-u", w.gateway.url]) == 1
        assert "There is no link from 'east' to 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rotation", "told"),
    [
        ({"earlier": ""}, ""),
        (
            {"waits_for": ["p0"], "moved": 0.0, "left_s": 3600.0},
            "names of blocks: wait until p0 have the newest secret",
        ),
        ({"moved": 0.5, "left_s": 1800.0}, "names of blocks: 50% moved to the newest secret, all in 0.5 h"),
        ({"moved": 1.0, "left_s": 0.0}, "names of blocks: the earlier secret is of no use any more: remove its line"),
    ],
)
def test_a_page_says_how_far_a_rotation_of_names_is(rotation: dict[str, Any], told: str) -> None:
    screen = Screen()
    screen.take({**nothing_happens(), "names": {"earlier": "old", "waits_for": []} | rotation})
    lines = [line.strip() for line in shown(screen.page(10)).splitlines() if line.startswith("names")]
    assert lines == ([told] if told else [])


def nothing_happens() -> dict[str, Any]:
    return {
        "boot": "b", "last_seq": 0, "requests": [], "clock_s": 0.0, "model": "m", "workers": {}, "plan": None,
        "in_flight": 0, "max_in_flight": 1, "waiting": 0, "threshold_tokens": 1.0, "links": [], "nodes": [],
    }  # fmt: skip


def account(tenant: str, tokens: int) -> dict[str, Any]:
    return {
        "tenant": tenant, "requests": {"200": 2, "429": 1}, "prompt_tokens": tokens, "cached_tokens": tokens // 2,
        "completion_tokens": 5,
    }  # fmt: skip


def test_tenants_are_shown_and_whether_their_sums_are_complete() -> None:
    screen = Screen()
    screen.take(nothing_happens())
    assert "tenant" not in shown(screen.page(10))
    usage = {"gateways": 3, "complete": True, "data": [account(f"t{n}", 1_200_000 - n) for n in range(40)]}
    screen.take_usage(usage)
    page = shown(screen.page(1 << 30))
    assert next(line.split() for line in page.splitlines() if line.startswith("t0 ")) == [
        "t0",
        "3",
        "1.2",
        "M",
        "50%",
        "5",
    ]
    assert "of 3 gateways" in page
    assert "t20 " in page  # which stands for the rest, where the gateway cuts the list
    assert "t21 " not in page
    assert "t3 " not in shown(screen.page(10))
    screen.take_usage({**usage, "complete": False})
    screen.take_usage(None)
    assert "sums of gateways are not complete" in shown(screen.page(10))


@pytest.mark.parametrize(
    ("name", "told"),
    [("[/x]", "[/x]"), ("[red]a", "[red]a"), ("a\x1b[2Jb", "a?[2Jb"), ("a\u202eb", "a?b"), ("a\nb", "a?b")],
)
def test_a_tenants_name_is_shown_as_text(name: str, told: str) -> None:
    screen = Screen()
    screen.take(nothing_happens())
    screen.take_usage({"gateways": 1, "complete": True, "data": [account(name, 7)]})
    page = shown(screen.page(10))
    assert any(line.split()[:1] == [told] for line in page.splitlines())
    assert not set(page) & {"\x1b", "\u202e"}


@on_loop
async def test_tenants_of_a_gateway_are_asked_for() -> None:
    tenants = {"acme": TenantConfig(keys=(digest_of("sk-acme"),))}
    async with world(decode=1, tenants=tenants, operator_keys=(digest_of("sk-op"),)) as w:
        await w.complete(LONG, headers={"Authorization": "Bearer sk-acme"})
        await w.idle()
        gateway = GatewayClient(w.gateway.url, {"Authorization": "Bearer sk-op"})
        page = shown(await asyncio.to_thread(once, gateway))
        assert any(line.split()[:2] == ["acme", "1"] for line in page.splitlines())


@on_loop
async def test_several_models_are_shown_with_their_nodes() -> None:
    table = ModelTable(name="coder", tokenizer_dir=Path("unused"), threshold_tokens=7.0)
    async with world(remote=1, local=1, decode=2) as w:
        gateway = GatewayClient(w.gateway.url)
        assert "model " not in shown(await asyncio.to_thread(once, gateway))
    async with world(remote=0, local=0, decode=2, models=(table,), load_tokenizer=lambda config: text_tokenizer()) as w:
        gateway, node = GatewayClient(w.gateway.url), w.nodes.decode[0]
        page = shown(await asyncio.to_thread(once, gateway))
        assert "model coder: no decode node ready, t = 7\n" in page
        node.model_id, node.layout = "coder", replace(LAYOUT, block_size=32)
        node.become(pb.NODE_STATE_READY)
        await until(lambda: w.gateway.models.serves("coder"))
        page = shown(await asyncio.to_thread(once, gateway))
        assert "model coder: 1 nodes, t = 7\n" in page
        assert "model scripted: 1 nodes, t = 100\n" in page
        assert "revision" not in page


@on_loop
async def test_several_revisions_are_shown_with_their_nodes() -> None:
    async with world(remote=1, local=1, decode=2) as w:
        gateway = GatewayClient(w.gateway.url)
        assert "revision" not in shown(await asyncio.to_thread(once, gateway))
        node = w.nodes.decode[0]
        node.layout = replace(LAYOUT, block_size=32)
        node.become(pb.NODE_STATE_READY)
        await until(lambda: len(w.clusters.revisions) == 2)
        page = shown(await asyncio.to_thread(once, gateway))
        assert f"revision {LAYOUT.fingerprint[:12]}: 1 decode, 2 prefill\n" in page
        assert f"revision {node.layout.fingerprint[:12]}: 1 decode\n" in page
