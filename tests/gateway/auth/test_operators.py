"""Operators as people: names, roles, ends of keys, and which route needs what, cell by cell over all routes there are."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.auth.keyring import Keyring, digest_of
from gateway.auth.operator import Operator
from gateway.auth.rights import RIGHTS, right_of
from gateway.config.gateway import GatewayConfig
from gateway.config.operators import OperatorConfig, OperatorRole
from gateway.config.tenants import TenantConfig
from gateway.errors import Forbidden, Unauthorised
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import World, on_loop, world
from tests.transport.path.ports import free_port
from transport.control.settings import SettingsError, build

ACME, OLD = "sk-acme", "sk-old"
KEYS = {role: f"sk-{role}" for role in OperatorRole}
PAST = datetime(2020, 1, 1, tzinfo=UTC)
OPERATORS = (
    *(OperatorConfig(name=f"{role}-person", keys=(digest_of(key),), role=role) for role, key in KEYS.items()),
    OperatorConfig(name="gone", keys=(digest_of(OLD),), role=OperatorRole.ADMIN, expires=PAST),
)
TENANTS = {"acme": TenantConfig(keys=(digest_of(ACME),))}
JSON = {"Content-Type": "application/json"}


def shown(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def config_of(**values: Any) -> GatewayConfig:
    nodes = [{"agent": "127.0.0.1:7001"}]
    return build(GatewayConfig, {"tokenizer_dir": "tok", "nodes": nodes, **values}, "[gateway]")


def entry(name: str, key: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "keys": [digest_of(key)], **values}


def test_a_file_names_operators_their_roles_and_the_end_of_their_keys() -> None:
    config = config_of(operators=[entry("ann", "a"), entry("bob", "b", role="admin", expires="2027-01-31")])
    ann, bob = config.operators
    assert (ann.role, ann.expires) == (OperatorRole.VIEWER, None)
    assert (bob.role, bob.expires) == (OperatorRole.ADMIN, datetime(2027, 1, 31, tzinfo=UTC))


def test_keys_without_a_name_are_of_numbered_admins() -> None:
    config = config_of(operator_keys=[digest_of("a"), digest_of("b")], operators=[entry("ann", "c")])
    assert [(each.name, each.role) for each in config.all_operators] == [
        ("ann", OperatorRole.VIEWER), ("operator-1", OperatorRole.ADMIN), ("operator-2", OperatorRole.ADMIN),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"operators": [entry("ann", "a"), entry("ann", "b")]}, "operators.*each name once"),
        ({"operators": [entry("ann", "a"), entry("bob", "a")]}, "operators.*each key with one operator"),
        ({"operators": [entry("ann", "a")], "operator_keys": [digest_of("a")]}, "each key with one operator"),
        ({"operators": [{"name": "ann", "keys": ["sk-a"]}]}, "keys.*SHA-256"),
        ({"operators": [{"name": "ann", "keys": []}]}, "keys.*at least one"),
        ({"operators": [entry("a b", "a")]}, "name = 'a b'"),
        ({"operators": [entry("ann", "a", role="root")]}, "role.*'viewer', 'operator' or 'admin'"),
        ({"operators": [entry("ann", "a", expires="soon")]}, "expires.*a date"),
        (
            {"operators": [entry("ann", "a")], "tenants": {"acme": {"keys": [digest_of("a")]}}},
            "tenants.acme.keys: a key of operator 'ann'",
        ),
        (
            {"operator_keys": [digest_of("a")], "tenants": {"acme": {"keys": [digest_of("a")]}}},
            "tenants.acme.keys: a key of operator 'operator-1'",
        ),
    ],
)
def test_files_that_say_it_wrong_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config_of(**values)


def test_a_key_ends_when_the_file_says() -> None:
    now = [0.0]
    ends = datetime(2027, 1, 31, tzinfo=UTC)
    tenants = {"acme": replace(TENANTS["acme"], expires=ends)}
    operators = [replace(OPERATORS[2], expires=ends)]
    keyring = Keyring(tenants, operators, unix_s=lambda: now[0])
    admin = shown(KEYS[OperatorRole.ADMIN])
    now[0] = (ends - timedelta(seconds=1)).timestamp()
    assert keyring.tenant(shown(ACME)).name == "acme"
    assert keyring.check_operator(admin) == Operator("admin-person", OperatorRole.ADMIN)
    now[0] = ends.timestamp()
    for ask in (lambda: keyring.tenant(shown(ACME)), lambda: keyring.check_operator(admin)):
        with pytest.raises(Unauthorised) as refusal:
            ask()
        assert refusal.value.code == "expired_api_key"


def test_a_role_covers_those_before_it() -> None:
    keyring = Keyring({}, OPERATORS)
    for has, key in KEYS.items():
        for needed in OperatorRole:
            if has.covers(needed):
                assert keyring.check_operator(shown(key), needed).role is has
            else:
                with pytest.raises(Forbidden, match=f"needs the role {needed}, and {has}-person has {has}"):
                    keyring.check_operator(shown(key), needed)
    order = list(OperatorRole)
    assert [[has.covers(needed) for needed in order] for has in order] == [
        [True, False, False], [True, True, False], [True, True, True],
    ]  # fmt: skip


ANYBODYS = {"/health", "/healthz", "/readyz", "/readiness", "/livez", "/liveness", "/ping"}


def routes_of(w: World) -> set[tuple[str, str]]:
    """Every route that a gateway answers at a port of operators alone, which has no others but health."""
    operators = w.gateway.listeners[-1].app.router
    return {
        (route.method, route.resource.canonical)
        for route in operators.routes()
        if route.resource is not None and route.method != "HEAD"
    }


async def status_of(w: World, route: tuple[str, str], key: str | None) -> int:
    headers = JSON | (shown(key) if key else {})
    url = w.gateway.metrics_url.removesuffix("/metrics") + route[1]
    async with w.http.request(route[0], url, headers=headers, data=b"{}" if route[0] != "GET" else None) as answer:
        return answer.status


@on_loop
async def test_routes_let_those_in_whom_their_port_is_for() -> None:
    async with world(tenants=TENANTS, operators=OPERATORS, metrics_port=free_port()) as w:
        await every_route_of_operators_lets_those_in_whom_the_table_says(w)
        await every_path_of_the_api_is_for_tenants_and_for_no_operator(w)


async def every_route_of_operators_lets_those_in_whom_the_table_says(w: World) -> None:
    routes = routes_of(w)
    guarded = {route for route in routes if route[1] not in ANYBODYS}
    assert {route for route in RIGHTS if route[1] != "/console/"} <= guarded
    for route in sorted(guarded):
        right = right_of(*route)
        for key in (None, "sk-nobody", ACME, OLD):
            found = await status_of(w, route, key)
            may = right.role is None and route[1] != "/console"
            assert (found not in (401, 403)) == may, (route, key, found)
        for role, key in KEYS.items():
            found = await status_of(w, route, key)
            may = right.role is None or role.covers(right.role)
            assert (found not in (401, 403)) == may, (route, role, found)
            if not may:
                assert found == 403, (route, role, found)


PUBLIC = ANYBODYS | {"/openapi.json"}


async def every_path_of_the_api_is_for_tenants_and_for_no_operator(w: World) -> None:
    routes = {
        (route.method, route.resource.canonical.replace("{context_id}", "c"))
        for route in w.gateway.listeners[0].app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    guarded = {route for route in routes if route[1] not in PUBLIC}
    assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models")} <= guarded
    assert not {path for _, path in routes if path.startswith(("/prfaas", "/console", "/metrics"))} & {
        path for _, path in RIGHTS
    }
    for method, path in sorted(guarded):
        for key, may in ((None, False), ("sk-nobody", False), (OLD, False), (ACME, True)):
            headers = JSON | (shown(key) if key else {})
            body = None if method == "GET" else b"{}"
            async with w.http.request(method, path, headers=headers, data=body) as answer:
                assert (answer.status != 401) == may, (method, path, key, answer.status)
        for key in KEYS.values():  # an operator is no tenant
            async with w.http.request(method, path, headers=JSON | shown(key), data=body) as answer:
                assert answer.status == 401, (method, path, key)


def test_a_route_without_a_cell_is_not_served() -> None:
    with pytest.raises(KeyError, match="no right is declared for it"):
        right_of("POST", "/prfaas/anything")
    with pytest.raises(KeyError):
        right_of("DELETE", "/console/app.js")


@on_memory_loop
async def test_operators_are_taken_up_while_it_runs() -> None:
    async with pipeline(operators=OPERATORS) as w:
        headers = shown(KEYS[OperatorRole.VIEWER])
        async with w.http.get("/metrics", headers=headers) as answer:
            assert answer.status == 200
        assert w.reloads.take(replace(w.config, operators=OPERATORS[1:])) == []
        async with w.http.get("/metrics", headers=headers) as answer:
            assert answer.status == 401
