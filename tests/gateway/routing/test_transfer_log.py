"""Who sent what over a link, and why: requests, moves and probes, with one cursor for all."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.config.gateway import RoutingConfig
from gateway.routing.prefix_transfers import PrefixTransfer
from gateway.routing.transfer_log import Flows
from gateway.workers.peers import WorkerPeers
from gateway.workers.shared_counters import SharedCounters, WorkerState
from tests.gateway.admission.test_slo import LONG
from tests.gateway.cluster.test_inflight_load import node_of
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.routing.test_prefix_transfers import holds
from tests.gateway.worlds import on_loop, until

SENT_AWAY = RoutingConfig(cross_cluster_cache=True, prefill_tokens_per_s=50.0)


async def flows(w: Pipelined, since: int = 0) -> list[dict[str, Any]]:
    async with w.http.get(f"/prfaas/flows?since={since}") as answer:
        assert answer.status == 200
        return [json.loads(line) for line in (await answer.text()).splitlines()]


@on_memory_loop
async def test_a_request_s_kvcache_is_told_with_its_reason_and_its_class() -> None:
    async with pipeline(decode=1) as w:
        await w.complete(LONG, headers={"x-request-id": "mine"})
        await w.complete("hello there")
        await w.idle()
        first, *_ = found = await flows(w)
        assert (first["kind"], first["source_cluster"], first["destination_cluster"]) == ("request", "east", "west")
        assert (first["source"], first["destination"], first["why"], first["who"]) == ("r0", "d0", "long", "mine")
        assert (first["outcome"], first["service_class"]) == ("ok", "default")
        assert first["bytes"] > 0
        assert first["seconds"] >= 0
        assert abs(first["at"] - datetime.now(UTC).timestamp()) < 60
        assert await flows(w, since=found[-1]["seq"]) == []


@on_memory_loop
async def test_moves_and_probes_are_told_between_requests_and_no_cursor_misses_any() -> None:
    async with pipeline(decode=1, routing=SENT_AWAY) as w:
        (remote,) = w.nodes.remote
        await holds(w, remote, [LONG])
        await w.complete(f"{LONG} and so on")
        await w.idle()
        (move,) = [flow for flow in await flows(w) if flow["kind"] == "move"]
        assert (move["source"], move["bytes"], move["outcome"], move["why"]) == ("r0", 500, "ok", "request")
        assert move["who"].startswith("prefix ")
        remote.script.path_is_down = True
        await w.complete(f"another {LONG * 2}")
        await w.idle()
        await until(lambda: remote.probes)
        remote.script.path_is_down = False
        await until(lambda: w.links.status()[0].up)
        found = [flow for flow in await flows(w, since=move["seq"]) if flow["kind"] == "probe"]
        assert (found[-1]["outcome"], found[-1]["bytes"]) == ("ok", 0)
        numbers = [flow["seq"] for flow in await flows(w)]
        assert numbers == sorted(set(numbers))
        async with w.http.get("/prfaas/console") as answer:
            snapshot = await answer.json()
        seen = [each["seq"] for each in snapshot["requests"] + snapshot["flows"]]
        assert snapshot["last_seq"] == max(seen)
        assert set(numbers) <= set(seen)


def test_what_is_kept_is_bounded_and_a_copy_is_told_from_a_move() -> None:
    ring = Flows(iter(range(1, 100)).__next__, lambda: 5.0, limit=3)
    for reason in ("request", "hot", "hot", "rebalance"):
        ring.moved(PrefixTransfer(node_of("p0"), node_of("p1"), (b"\x01" * 32,), 32, 100, reason), "ok", 100, 0.5)
    assert [(flow.seq, flow.kind, flow.why) for flow in ring.since(0)] == [
        (2, "replica", "hot"),
        (3, "replica", "hot"),
        (4, "replica", "rebalance"),
    ]
    assert [flow.seq for flow in ring.since(3)] == [4]


@on_loop
async def test_workers_flows_come_in_the_order_of_their_numbers_and_no_later_one_before_an_earlier(
    tmp_path: Path,
) -> None:
    SharedCounters.create(tmp_path / "board", 2, 1)
    boards = [SharedCounters(tmp_path / "board", number) for number in range(2)]
    first, second = node_of("p0"), node_of("p1")
    rings = [Flows(board.next_seq, lambda: 5.0) for board in boards]
    workers = [
        WorkerPeers(tmp_path, number, boards[number], {"requests": rings[number], "flows": rings[number]})
        for number in range(2)
    ]
    for board, worker in zip(boards, workers, strict=True):
        await worker.start()
        board.be(WorkerState.READY)
    for ring in (rings[0], rings[1], rings[1], rings[0]):
        ring.probed(first, second, "", 0.1)
    for worker in workers:
        found, silent = await worker.lines("flows", 1, worker.last_seq())
        assert ([seq for seq, _ in found], silent) == ([2, 3, 4], 0)
        assert [seq for seq, _ in (await worker.lines("flows", 0, 2))[0]] == [1, 2]
    for board, worker in zip(boards, workers, strict=True):
        await worker.close()
        board.close()
