"""What tenants have been served: the same on /metrics, as JSON and as CSV; every byte over a link has an owner."""

import asyncio
import csv
import io
import json
from typing import Any, cast

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from gateway.auth.keyring import digest_of
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.node import ClusterNode
from gateway.config.tenants import TenantConfig
from gateway.errors import AgentCallFailed
from gateway.routing.prefix_transfers import PrefixTransfer, PrefixTransfers
from gateway.tasks import TaskSet
from gateway.telemetry.instruments import Children
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tenant_usage import SentBytes, TenantUsage, as_csv, spent_by
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import PATIENCE_S, on_loop, until
from transport.control.messages import TicketInfo

ACME, RIVAL, OPERATOR = "sk-acme", "sk-rival", "sk-operator"
TENANTS = {
    "acme": TenantConfig(keys=(digest_of(ACME),)),
    "rival": TenantConfig(keys=(digest_of(RIVAL),), concurrent_requests=1),
}
LONG = "the quick brown fox jumps over the lazy dog " * 40


def key(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def test_a_tenants_series_become_one_account() -> None:
    found = spent_by(
        [({"tenant": "b", "status": "200"}, 2.0), ({"tenant": "a", "status": "429"}, 1.0)],
        [({"tenant": "b", "kind": "prompt"}, 100.0), ({"tenant": "b", "kind": "cached"}, 60.0)],
        [({"tenant": "b", "source": "east", "destination": "west", "kind": "move"}, 1e12)],
    )
    assert [each.tenant for each in found] == ["a", "b"]
    sent = [SentBytes("east", "west", "move", 10**12)]
    assert found[1] == TenantUsage(tenant="b", requests={"200": 2}, prompt_tokens=100, cached_tokens=60, kv_bytes=sent)
    assert list(csv.reader(io.StringIO(as_csv(found))))[-2:] == [
        ["b", "completion_tokens", "", "", "0"],
        ["b", "kv_bytes_move", "east", "west", "1000000000000"],
    ]


def test_series_beyond_the_most_leave_the_accounts_of_the_others() -> None:
    tokens = Counter("tokens", "Tokens", ["tenant", "kind"], registry=CollectorRegistry())
    children = Children(tokens, most=2)
    for number in range(3):
        children[f"t{number}", "prompt"].inc(7)
    (family,) = tokens.collect()
    series = [(each.labels, each.value) for each in family.samples if each.name == "tokens_total"]
    found = [(each.tenant, each.prompt_tokens) for each in spent_by([], series, [])]
    assert found == [("t0", 7), ("t1", 7)]  # the one series for all others adds up all kinds


@on_memory_loop
async def test_what_was_served_to_whom() -> None:
    async with pipeline(tenants=TENANTS, operator_keys=(digest_of(OPERATOR),)) as w:
        for _ in range(2):
            assert (await w.complete(LONG, headers=key(ACME))).status == 200
        assert (await w.complete(["a", "b"], headers=key(RIVAL))).status == 400
        await w.idle()
        async with w.http.get("/prfaas/usage", headers=key(ACME)) as refused:
            assert refused.status == 401
        async with w.http.get("/prfaas/usage", headers=key(OPERATOR)) as answer:
            acme, rival = (await answer.json())["data"]
        assert (acme["tenant"], acme["requests"]) == ("acme", {"200": 2})
        assert acme["completion_tokens"] > 0
        assert rival == {
            "tenant": "rival", "requests": {"400": 1}, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0,
            "kv_bytes": [],
        }  # fmt: skip
        async with w.http.get("/prfaas/requests", headers=key(OPERATOR)) as lines:
            records = [json.loads(line) async for line in lines.content]
        assert len(records) == 2
        assert acme["prompt_tokens"] == sum(each["total"] for each in records)
        assert acme["cached_tokens"] == sum(each["cached"] for each in records)
        assert sum(each["bytes"] for each in acme["kv_bytes"]) == sum(each["bytes"] for each in records) > 0
        assert {each["kind"] for each in acme["kv_bytes"]} == {"request"}
        async with w.http.get("/metrics", headers=key(OPERATOR)) as page:
            text = await page.text()
        assert 'prfaas_tenant_requests_total{status="200",tenant="acme"} 2.0' in text
        async with w.http.get("/prfaas/usage?format=csv", headers=key(OPERATOR)) as table:
            assert table.content_type == "text/csv"
            assert ["acme", "requests_200", "", "", "2"] in list(csv.reader(io.StringIO(await table.text())))
        async with w.http.get("/prfaas/usage?top=1", headers=key(OPERATOR)) as answer:
            first, others = (await answer.json())["data"]
        assert (first, others) == (acme, rival | {"tenant": "other"})
        for query in ("format=xml", "gateway=g1", "top=0", "top=x"):
            async with w.http.get(f"/prfaas/usage?{query}", headers=key(OPERATOR)) as refused:
                assert refused.status == 400
        async with w.http.get("/prfaas/usage?gateway=self", headers=key(OPERATOR)) as answer:
            assert await answer.json() == {"data": [acme, rival]}


@on_memory_loop
async def test_without_tenants_nobody_has_an_account() -> None:
    async with pipeline() as w:
        assert (await w.complete(LONG)).status == 200
        await w.idle()
        async with w.http.get("/prfaas/usage") as answer:
            assert await answer.json() == {"data": []}


@on_memory_loop
async def test_of_a_stream_that_another_engine_goes_on_with_the_answer_is_no_prompt_and_both_transfers_count() -> None:
    async with pipeline(tenants=TENANTS, operator_keys=(digest_of(OPERATOR),)) as w:
        faults = ["die_after 5"]
        for node in w.nodes.decode:
            node.script.words, node.script.is_resumable, node.script.decode = (" w",) * 12, True, faults
        assert (await w.complete(LONG, headers=key(ACME), stream=True)).status == 200
        await w.idle()
        async with w.http.get("/prfaas/requests", headers=key(OPERATOR)) as lines:
            (record,) = [json.loads(line) async for line in lines.content]
        assert record["takeovers"] == 1
        async with w.http.get("/prfaas/usage", headers=key(OPERATOR)) as answer:
            (acme,) = (await answer.json())["data"]
        assert acme["prompt_tokens"] == record["total"]
        assert acme["cached_tokens"] <= acme["prompt_tokens"]
        legs = [body for node in w.nodes.remote + w.nodes.local for body in node.bodies]
        assert len(legs) == 2
        assert sum(each["bytes"] for each in acme["kv_bytes"]) > record["bytes"] > 0


@on_loop
async def test_a_prefix_that_crossed_the_link_and_was_not_taken_is_counted() -> None:
    class Source:
        address = "r0"

        async def load(self, *_: object) -> int:
            return 500

    class Target:
        address = "p0"

        async def reserve_prefix(self, *_: object) -> TicketInfo:
            return TicketInfo(
                transfer_id="t", secret=b"", num_tokens=16, have_tokens=0, tokens_digest=b"", endpoints=(), ttl_s=1.0,
                layout_fingerprint="", node_id="p0", cluster="west",
            )  # fmt: skip

        async def commit(self, *_: object) -> None:
            raise AgentCallFailed("p0", "no_capacity")

        async def abort(self, *_: object) -> None:
            pass

    source, target = (ClusterNode(cast(AgentClient, each)) for each in (Source(), Target()))
    metrics, tasks = Metrics(), TaskSet(lambda name: None)
    moves = PrefixTransfers(metrics, tasks, lambda: 0.0, limit=1, timeout_s=PATIENCE_S)
    assert (
        await moves.make(PrefixTransfer(source, target, (b"h" * 32,), 16, 500, tenant="acme"), PATIENCE_S)
        == "no_capacity"
    )
    await tasks.join(PATIENCE_S)
    (spent,) = metrics.spent()
    assert [each.bytes for each in spent.kv_bytes] == [500]


LIMITED = {"acme": TenantConfig(keys=(digest_of(ACME),), tokens_per_minute=600)}


async def spent(w: Pipelined) -> dict[str, Any]:
    async with w.http.get("/prfaas/usage", headers=key(OPERATOR)) as answer:
        (acme,) = (await answer.json())["data"]
        return cast(dict[str, Any], acme)


async def left_of(w: Pipelined) -> int:
    """What is left of its tokens, after one more request for an answer that is short."""
    answer = await w.complete("x", headers=key(ACME), max_tokens=1)
    return int(answer.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@on_memory_loop
async def test_who_hangs_up_before_the_first_byte_pays_for_the_prompt(stream: bool, is_alone: bool) -> None:
    threshold = 1e9 if is_alone else 100.0
    places = {"remote": 0, "decode": 1} if is_alone else {}
    async with pipeline(
        tenants=LIMITED, operator_keys=(digest_of(OPERATOR),), threshold_tokens=threshold, **places
    ) as w:
        gate = asyncio.Event()
        for node in w.nodes.remote + w.nodes.local + w.nodes.decode:
            node.script.decode_gate = node.script.prefill_gate = gate
        asking = asyncio.create_task(w.complete(LONG, headers=key(ACME), stream=stream, max_tokens=50))
        await until(lambda: any(node.bodies for node in w.nodes.decode))
        asking.cancel()
        await asyncio.wait([asking])
        await w.idle()
        gate.set()
        account = await spent(w)
        assert account["requests"] == {"499": 1}
        assert account["prompt_tokens"] > 300
        assert account["completion_tokens"] <= 50
        assert await left_of(w) < 500  # and some have run in meanwhile


@on_memory_loop
async def test_what_no_engine_took_costs_nothing() -> None:
    async with pipeline(tenants=LIMITED, operator_keys=(digest_of(OPERATOR),), remote=0, local=0, decode=1) as w:
        for node in w.nodes.decode:
            await node.stop_engine()
        assert (await w.complete("hello there", headers=key(ACME))).status == 503
        await w.idle()
        account = await spent(w)
        assert (account["requests"], account["prompt_tokens"]) == ({"503": 1}, 0)


@on_memory_loop
async def test_embeddings_are_paid_for_whether_waited_for_or_not() -> None:
    async with pipeline(tenants=LIMITED, operator_keys=(digest_of(OPERATOR),), decode=1) as w:

        async def embed() -> int:
            async with w.http.post("/v1/embeddings", json={"input": LONG}, headers=key(ACME)) as answer:
                return answer.status

        assert await embed() == 200
        assert (await spent(w))["prompt_tokens"] == 100
        w.nodes.decode[0].script.decode = ["hang"]
        asking = asyncio.create_task(embed())
        await until(lambda: len(w.nodes.decode[0].bodies) == 2)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not w.admission.in_flight)
        account = await spent(w)
        assert account["prompt_tokens"] == 100 + -(-len(json.dumps({"input": LONG})) // 4)
        assert account["requests"] == {"200": 1}
        assert await left_of(w) < 400  # and some have run in meanwhile


class LateReportingNode(ScriptedNode):
    """Its KVCache lands in time; the report of it, which the answer's usage waits for, does not come."""

    async def _prefill(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await super()._prefill(http, body)
        await asyncio.sleep(PATIENCE_S)
        return response


@on_memory_loop
async def test_a_client_that_leaves_while_its_whole_answer_is_put_together_pays_for_it() -> None:
    async with pipeline(kind=LateReportingNode, tenants=LIMITED, operator_keys=(digest_of(OPERATOR),)) as w:
        leaving = asyncio.create_task(w.complete(LONG, headers=key(ACME)))
        await until(lambda: any(node.bodies and not node.running for node in w.nodes.decode))
        leaving.cancel()
        await asyncio.wait([leaving])
        await w.idle()
        account = await spent(w)
        assert account["requests"] == {"499": 1}
        assert account["completion_tokens"] > 0
