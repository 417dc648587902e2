"""Tenants before a running gateway: which of them are served, what each finds in caches, and what is closed to them."""

from typing import Any

import pytest

from gateway.auth.keyring import digest_of
from gateway.config.tenants import TenantConfig
from gateway.prompt.prompt import Hashing
from hybrid_cache.hashing.block_hash import namespaced
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import Deployment, on_loop, world

ACME, RIVAL, FRIEND, OPERATOR = "sk-acme", "sk-rival", "sk-friend", "sk-operator"
TENANTS = {
    "acme": TenantConfig(keys=(digest_of(ACME),)),
    "rival": TenantConfig(keys=(digest_of(RIVAL),), group="friends"),
    "friend": TenantConfig(keys=(digest_of(FRIEND),), group="friends"),
}
LONG = "the quick brown fox " * 100


def key(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


async def get(w: Deployment, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with w.http.get(path, headers=headers) as answer:
        return answer.status, answer.headers.get("WWW-Authenticate")


@on_memory_loop
async def test_who_shows_no_key_of_a_tenant_gets_nothing() -> None:
    async with pipeline(tenants=TENANTS) as w:
        for headers in (None, key("sk-wrong")):
            response = await w.complete(LONG, headers=headers)
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == 'Bearer realm="prfaas"'
            assert (await response.json())["error"]["code"] in ("missing_api_key", "invalid_api_key")
            for path in (
                "/v1/tokenize",
                "/v1/embeddings",
                "/v1/messages/count_tokens",
                "/v1/messages",
                "/v1/responses",
            ):
                async with w.http.post(path, json={"model": "scripted"}, headers=headers) as refused:
                    assert refused.status == 401, path
            assert (await get(w, "/v1/models", headers))[0] == 401
            assert (await get(w, "/v1/models/scripted", headers))[0] == 401
        assert not w.nodes.leftovers()
        assert (await w.complete(LONG, headers=key(ACME))).status == 200
        assert (await get(w, "/v1/models", key(ACME)))[0] == 200
        assert (await get(w, "/health"))[0] == 200  # for load balancers
        async with w.http.get("/health") as health:
            assert "nodes" not in await health.json()


OPERATORS_PAGES = ("/metrics", "/prfaas/requests", "/prfaas/links", "/prfaas/load", "/prfaas/console", "/console")


@pytest.mark.parametrize("page", OPERATORS_PAGES)
def test_operators_pages_are_closed_to_tenants(page: str) -> None:
    @on_memory_loop
    async def scenario() -> None:
        async with pipeline(tenants=TENANTS, operator_keys=(digest_of(OPERATOR),)) as w:
            for headers in (None, key(ACME)):
                assert await get(w, page, headers) == (401, 'Bearer realm="prfaas"')
            assert (await get(w, page, key(OPERATOR)))[0] == 200
            async with w.http.post("/prfaas/explain", json={"model": "scripted", "prompt": "x"}) as refused:
                assert refused.status == 401

    scenario()


@on_memory_loop
async def test_a_tenants_blocks_have_names_of_its_group() -> None:
    async with pipeline(tenants=TENANTS) as w:
        served = w.clusters.served
        assert served is not None
        for each, group in ((ACME, "acme"), (RIVAL, "friends"), (FRIEND, "friends")):
            namespace = Hashing(16, b"", group).namespace(None)
            assert (await w.complete(LONG, headers=key(each))).status == 200
            legs = [leg for node in w.nodes.nodes for leg in node.bodies]
            assert {leg["kv_transfer_params"]["salt"] for leg in legs} == {
                namespaced(served.hashing.salt, namespace).hex()
            }
            assert {leg["cache_salt"] for leg in legs} == {namespace}
            for node in w.nodes.nodes:
                node.bodies.clear()


@on_memory_loop
async def test_a_ticket_says_whose_it_is_and_with_which_weight() -> None:
    tenants = {"acme": TenantConfig(keys=(digest_of(ACME),), weight=3.0)}
    async with pipeline(tenants=tenants) as w:
        assert (await w.complete(LONG, headers=key(ACME))).status == 200
        legs = [leg["kv_transfer_params"] for node in w.nodes.nodes for leg in node.bodies]
        tickets = [params["ticket"] for params in legs if params.get("ticket")]
        assert [(ticket["tenant"], ticket["weight"]) for ticket in tickets] == [("acme", 3.0)]


@pytest.mark.parametrize(("prefill_nodes", "legs"), [(1, 2), (0, 1)])
def test_each_leg_says_whose_it_is_and_with_which_weight(prefill_nodes: int, legs: int) -> None:
    @on_memory_loop
    async def scenario() -> None:
        tenants = {"acme": TenantConfig(keys=(digest_of(ACME),), weight=3.0)}
        async with pipeline(remote=prefill_nodes, local=0, decode=1, tenants=tenants) as w:
            assert (await w.complete(LONG, headers=key(ACME))).status == 200
            said = [leg["kv_transfer_params"] for node in w.nodes.nodes for leg in node.bodies]
            assert [(params["tenant"], params["weight"]) for params in said] == [("acme", 3.0)] * legs

    scenario()


@on_memory_loop
async def test_without_tenants_legs_are_nobodys() -> None:
    async with pipeline() as w:
        assert (await w.complete(LONG)).status == 200
        assert not any("tenant" in leg["kv_transfer_params"] for node in w.nodes.nodes for leg in node.bodies)


@on_memory_loop
async def test_records_say_whose_a_request_was() -> None:
    async with pipeline(tenants=TENANTS, operator_keys=(digest_of(OPERATOR),)) as w:
        await w.complete(LONG, headers=key(ACME))
        await w.idle()
        async with w.http.get("/prfaas/requests", headers=key(OPERATOR)) as answer:
            assert '"tenant":"acme"' in await answer.text()


@on_loop
async def test_refusals_are_their_tenants_whatever_it_asked_for_and_however() -> None:
    tenants = {"acme": TenantConfig(keys=(digest_of(ACME),), requests_per_minute=1)}
    async with world(tenants=tenants, operator_keys=(digest_of(OPERATOR),), max_body_bytes=4096) as w:
        body = {"model": "scripted", "prompt": "x"}
        statuses = []
        for _ in range(2):
            async with w.http.post("/tokenize", json=body, headers=key(ACME)) as answer:
                statuses.append(answer.status)
        async with w.http.post("/v1/completions", data=b"x" * 5000, headers=key(ACME), expect100=True) as answer:
            statuses.append(answer.status)
        assert statuses == [200, 429, 413]
        async with w.http.get("/prfaas/usage", headers=key(OPERATOR)) as answer:
            (acme,) = (await answer.json())["data"]
        assert acme["requests"] == {"429": 1, "413": 1}


@on_memory_loop
async def test_an_operator_asks_what_would_become_of_a_tenants_request() -> None:
    async with pipeline(tenants=TENANTS, operator_keys=(digest_of(OPERATOR),)) as w:
        body = {"model": "scripted", "prompt": LONG}
        for tenant, status in (("acme", 200), ("nobody", 400), ("", 200)):
            async with w.http.post(f"/prfaas/explain?tenant={tenant}", json=body, headers=key(OPERATOR)) as answer:
                assert answer.status == status


@on_memory_loop
async def test_keys_are_taken_up_while_it_runs() -> None:
    from dataclasses import replace

    async with pipeline() as w:
        assert (await w.complete(LONG)).status == 200
        assert w.reloads.take(replace(w.config, tenants=TENANTS)) == []
        assert (await w.complete(LONG)).status == 401
        assert (await w.complete(LONG, headers=key(ACME))).status == 200
