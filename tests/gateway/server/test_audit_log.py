"""Who changed what: lines in files that stay bounded, the newest to ask for, refusals that push nothing out."""

import json
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from gateway.auth.keyring import digest_of
from gateway.auth.operator import Operator
from gateway.config.audit import AuditConfig
from gateway.config.operators import OperatorConfig, OperatorRole
from gateway.config.tenants import TenantConfig
from gateway.errors import GatewayConfigError
from gateway.server.audit_log import BURST_LINES, KEPT_REFUSED, SAME_SITE_S, AuditLog, Deed
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import Deployment, on_loop, world
from transport.control.settings import SettingsError

EAST_WEST = {"source": "east", "destination": "west", "drained": True}
OPERATORS = tuple(
    OperatorConfig(name=name, keys=(digest_of(f"sk-{name}"),), role=role)
    for name, role in (("ann", OperatorRole.ADMIN), ("vic", OperatorRole.VIEWER))
)


def shown(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


async def audit_of(w: Deployment, since: int = 0) -> list[dict[str, Any]]:
    async with w.http.get(f"/prfaas/audit?since={since}", headers=shown("vic")) as answer:
        assert answer.status == 200
        return [json.loads(line) for line in (await answer.text()).splitlines()]


def told(entries: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [(each["operator"], each["action"], each["target"], each["outcome"], each["code"]) for each in entries]


def lines_of(directory: Path, prefix: str) -> list[dict[str, Any]]:
    (path,) = directory.glob(f"{prefix}-*.jsonl")
    assert path.stat().st_mode & 0o777 == 0o600
    return [json.loads(line) for line in path.read_text().splitlines()]


@on_memory_loop
async def test_changes_and_refused_attempts_say_who_what_from_where_and_what_came_of_it(tmp_path: Path) -> None:
    async with pipeline(operators=OPERATORS, audit=AuditConfig(directory=tmp_path)) as w:
        for body, name, status in (
            (EAST_WEST, "ann", 200),
            ({**EAST_WEST, "drained": False}, "ann", 200),
            ({**EAST_WEST, "source": "moon"}, "ann", 404),
            (EAST_WEST, "vic", 403),
            (EAST_WEST, "nobody", 401),
        ):
            async with w.http.post("/prfaas/links", json=body, headers=shown(name)) as answer:
                assert answer.status == status
        async with w.http.post("/prfaas/config", json={}, headers=shown("ann")) as answer:
            assert answer.status == 200
        found = await audit_of(w)
        assert told(found) == [
            ("ann", "drain", "east:west", "done", ""),
            ("ann", "undrain", "east:west", "done", ""),
            ("ann", "drain", "moon:west", "failed", "link_not_found"),
            ("vic", "link", "POST /prfaas/links", "refused", "role_needed"),
            ("ann", "reload", "", "done", ""),
        ]
        assert {each["address"] for each in found} == {"127.0.0.1"}
        assert found[0]["role"] == "admin"
        assert told(await audit_of(w, found[-2]["seq"])) == told(found[-1:])
    done, refused = lines_of(tmp_path, "audit"), lines_of(tmp_path, "refused")
    assert told(done) == [each for each in told(found) if each[3] != "refused"]
    assert told(refused) == [each for each in told(found) if each[3] == "refused"]


@on_memory_loop
async def test_wrong_keys_are_written_down_with_their_address_and_counted() -> None:
    async with pipeline(tenants={"acme": TenantConfig(keys=(digest_of("sk-acme"),))}, operators=OPERATORS) as w:
        for _ in range(30):
            assert (await w.complete(headers=shown("guess"))).status == 401
        (line,) = await audit_of(w)
        assert (line["action"], line["target"], line["address"]) == ("show a key", "/v1/completions", "127.0.0.1")
        assert "sk-guess" not in json.dumps(line)
        async with w.http.get("/metrics", headers=shown("vic")) as answer:
            assert 'prfaas_wrong_keys_total{what="wrong"} 30.0' in await answer.text()


@on_memory_loop
async def test_a_stranger_writes_no_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    written = "/v1/models/x%0AINFO%20prfaas.gateway.audit%20done:%20reload%20by%20ann%E2%80%A8x%1B"
    async with pipeline(tenants={"acme": TenantConfig(keys=(digest_of("sk-acme"),))}, operators=OPERATORS) as w:
        for method, path in (("GET", written), ("POST", written)):
            async with w.http.request(method, URL(w.url + path, encoded=True), headers=shown("guess")) as answer:
                assert answer.status in (401, 404, 405)
        (line,) = await audit_of(w)
    assert line["target"] == r"/v1/models/x\nINFO prfaas.gateway.audit done: reload by ann\u2028x\x1b"
    for each in caplog.records:
        assert each.getMessage().isprintable()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def log_of(config: AuditConfig, clock: Clock) -> AuditLog:
    seqs = iter(range(1, 1 << 20))
    return AuditLog(config, lambda: next(seqs), clock, clock, lambda *_: None)


def test_refusals_of_an_address_are_a_line_in_a_while_that_counts_them() -> None:
    clock = Clock()
    audit = log_of(AuditConfig(), clock)
    for number in range(100):
        audit.refused(None, Deed("link"), f"2001:db8::{number:x}", 401, "operators_only")
    clock.now += SAME_SITE_S
    audit.refused(None, Deed("link"), "2001:db8::1", 401, "operators_only")
    assert [entry.count for entry in audit.since(0)] == [1, 100]


def test_refusals_from_everywhere_push_nothing_out() -> None:
    clock = Clock()
    audit = log_of(AuditConfig(), clock)
    audit.done(Operator("ann", OperatorRole.ADMIN), Deed("drain", "east:west"), "192.0.2.1", 200)
    for number in range(100_000):
        audit.refused(None, Deed("link"), f"198.51.{number >> 8 & 255}.{number & 255}", 401, "operators_only")
        clock.now += 0.01
    entries = list(audit.since(0))
    assert entries[0].operator == "ann"
    assert len(entries) <= 1 + KEPT_REFUSED
    assert entries[-1].seq <= 1 + BURST_LINES + 1000 + 1  # a line a second, of ten thousand


def test_files_stay_within_the_bound(tmp_path: Path) -> None:
    audit = log_of(AuditConfig(directory=tmp_path, max_bytes=1 << 20), Clock())
    for _ in range(3):
        for _ in range(3000):
            audit.done(Operator("ann"), Deed("drain", "x" * 512), "192.0.2.1", 200)
        audit.close()
        audit = log_of(AuditConfig(directory=tmp_path, max_bytes=1 << 20), Clock())
    audit.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 << 20


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(SettingsError, match=r"audit\.max_bytes"):
        AuditConfig(max_bytes=5)


@on_loop
async def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GatewayConfigError, match=r"audit\.directory = .*file/log"):
        async with world(audit=AuditConfig(directory=tmp_path / "file" / "log")):
            pass
