"""Reloads: what differs is told key by key, secrets are not, and a file that is wrong changes nothing."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.admin.reload import ConfigChange, Reloads, changes
from gateway.auth.keyring import digest_of
from gateway.config.gateway import GatewayConfig
from gateway.config.tenants import TenantConfig
from gateway.errors import GatewayConfigError, Unavailable
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from transport.control.settings import build

ACME = TenantConfig(keys=(digest_of("sk-acme"),))
JSON = {"Content-Type": "application/json"}


def config_of(**values: Any) -> GatewayConfig:
    nodes = [{"agent": "127.0.0.1:7001"}]
    return build(GatewayConfig, {"tokenizer_dir": "tok", "nodes": nodes, **values}, "[gateway]")


@pytest.mark.parametrize(
    ("was", "will", "change"),
    [
        ({}, {"max_waiting": 9}, ConfigChange("max_waiting", "256", "9", False)),
        ({}, {"near": ["west"]}, ConfigChange("near", "()", "('west',)", False)),
        ({}, {"port": 9}, ConfigChange("port", "8000", "9", True)),
        ({}, {"routing": {"tie_share": 0.5}}, ConfigChange("routing.tie_share", "1.0", "0.5", False)),
        ({}, {"routing": {"max_moves": 5}}, ConfigChange("routing.max_moves", "4", "5", True)),
        ({}, {"timeouts": {"room_s": 5.0}}, ConfigChange("timeouts.room_s", "30.0", "5.0", True)),
        (
            {"tenants": {"acme": {"keys": ["0" * 64]}}},
            {"tenants": {"acme": {"keys": ["1" * 64]}}},
            ConfigChange("tenants.acme.keys", "1 digests", "1 digests", False),
        ),
        (
            {"operator_keys": []},
            {"operator_keys": ["1" * 64]},
            ConfigChange("operator_keys", "0 digests", "1 digests", False),
        ),
    ],
)
def test_a_difference_is_told_by_its_key(was: Mapping[str, Any], will: Mapping[str, Any], change: ConfigChange) -> None:
    assert changes(config_of(**was), config_of(**will)) == [change]


def test_a_tenant_that_comes_is_told_without_its_digests() -> None:
    (change,) = changes(config_of(), config_of(tenants={"acme": {"keys": ["f" * 64], "weight": 2.0}}))
    assert (change.key, change.is_now) == ("tenants.acme", "none")
    assert "weight = 2.0" in change.will_be
    assert "ffff" not in change.will_be


def test_a_url_is_told_without_its_password() -> None:
    urls = [f"https://{user}collector.example:4318/v1/traces?as=a@b" for user in ("me:hunter2@", "me:other@", "")]
    first, second, third = (config_of(traces={"endpoint": url}) for url in urls)
    masked = urls[2].replace("//", "//…@")
    assert changes(first, second) == [ConfigChange("traces.endpoint", masked, masked, True)]
    assert changes(third, first) == [ConfigChange("traces.endpoint", urls[2], masked, True)]


async def asked(w: Pipelined, *, apply: bool = False, status: int = 200, headers: Mapping[str, str] = JSON) -> Any:
    async with w.http.request("POST" if apply else "GET", "/prfaas/config", headers=headers) as answer:
        assert answer.status == status
        return await answer.json()


@on_memory_loop
async def test_an_operator_sees_what_differs_and_has_it_taken_over() -> None:
    def read_again(config: GatewayConfig) -> GatewayConfig:
        return replace(config, max_waiting=7, workers=2)

    async with pipeline(read_again=read_again) as w:
        waiting = {"key": "max_waiting", "is_now": "256", "will_be": "7", "needs_restart": False}
        workers = {"key": "workers", "is_now": "1", "will_be": "2", "needs_restart": True}
        both = sorted([waiting, workers], key=lambda change: list(GatewayConfig.__slots__).index(str(change["key"])))
        assert await asked(w) == {"data": both}
        assert w.config.max_waiting == 256
        assert await asked(w, apply=True) == {"data": both}
        assert w.config.max_waiting == 7
        assert await asked(w) == {"data": [workers]}
        assert 'prfaas_config_reloads_total{outcome="partial"} 1.0' in await w.metrics()
        await asked(w, apply=True, status=415, headers={"Content-Type": "text/plain"})
        await asked(w, apply=True, status=403, headers={**JSON, "Origin": "https://elsewhere.example"})


@on_memory_loop
async def test_a_file_that_is_wrong_changes_nothing() -> None:
    def read_again(config: GatewayConfig) -> GatewayConfig:
        raise GatewayConfigError("gateway.toml: port = -1: must be from 0 to 65535")

    async with pipeline(read_again=read_again, tenants={"acme": ACME}, operator_keys=(digest_of("sk-op"),)) as w:
        key = {**JSON, "Authorization": "Bearer sk-op"}
        for apply in (False, True):
            said = await asked(w, apply=apply, status=409, headers=key)
            assert "port = -1" in said["error"]["message"]
            await asked(w, apply=apply, status=401)
            await asked(w, apply=apply, status=401, headers={**JSON, "Authorization": "Bearer sk-acme"})


def test_a_worker_whose_parent_is_gone_signals_nobody() -> None:
    config = config_of()
    reloads = Reloads(config, [], lambda: config, lambda _: None, parent=os.getpid())
    with pytest.raises(Unavailable):
        reloads.ask()


def test_nodes_that_the_rest_of_a_running_gateway_does_not_allow_wait_for_a_restart() -> None:
    running = config_of()
    moved = {"tokenizer_dir": "tok", "max_waiting": 9, "nodes": [], "membership": {"file": "nodes.toml"}}
    far = [{"agent": "192.0.2.7:7001"}]
    for wanted in (build(GatewayConfig, moved, "[gateway]"), config_of(nodes=far, plain=True, max_waiting=9)):
        possible = running.with_changes_of(wanted)
        assert (possible.nodes, possible.max_waiting) == (running.nodes, 9)
        waiting = {change.key: change.needs_restart for change in changes(running, wanted)}
        assert waiting["nodes"]
        assert not waiting["max_waiting"]
