"""What `prfaas check` says of keys: those without a name, and those that end."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gateway.auth.keyring import digest_of
from gateway.config.gateway import GatewayConfig
from prfaas.commands.access_findings import access_findings, tls_findings
from prfaas.commands.findings import Level
from tests.gateway.http.test_tls import issued
from tests.gateway.worlds import on_loop, world
from transport.control.settings import build

NOW = datetime(2027, 1, 1, tzinfo=UTC)


def found(**values: Any) -> list[tuple[Level, str, str]]:
    table = {"tokenizer_dir": "t", "nodes": [{"agent": "127.0.0.1:7001"}], **values}
    config = build(GatewayConfig, table, "[gateway]")
    return [(each.level, each.about, each.what) for each in access_findings(config, NOW.timestamp())]


def test_keys_without_a_name_are_warned_of() -> None:
    ((level, about, what),) = found(operator_keys=[digest_of("a"), digest_of("b")])
    assert (level, about) == (Level.WARNING, "operators")
    assert "2 operator_keys have no name" in what
    assert found(operators=[{"name": "ann", "keys": [digest_of("a")]}]) == []


def test_what_comes_in_clear_is_warned_of() -> None:
    ((level, about, _),) = found(host="10.0.0.1", open=True)
    assert (level, about) == (Level.WARNING, "https")
    assert found(host="10.0.0.1", open=True, plain=True) == []


@on_loop
async def test_listeners_are_asked_for_the_files_certificate(tmp_path: Path) -> None:
    files, other = issued(tmp_path / "one"), issued(tmp_path / "other")
    async with world(**files) as w:
        port = int(w.gateway.url.rpartition(":")[2])
        (fits,) = await tls_findings(replace(w.gateway.config, port=port))
        assert (fits.level, "HTTPS (TLSv1.3)" in fits.what) == (Level.OK, True)
        (differs,) = await tls_findings(replace(w.gateway.config, port=port, **other))
        assert (differs.level, "no HTTPS with the file's certificate" in differs.what) == (Level.ERROR, True)
    (gone,) = await tls_findings(replace(w.gateway.config, port=port))
    assert (gone.level, gone.what.startswith("no answer")) == (Level.ERROR, True)


def test_keys_that_end_are_warned_of_before() -> None:
    def ends(days: float) -> dict[str, Any]:
        return {"expires": NOW + timedelta(days=days)}

    tenants = {"acme": {"keys": [digest_of("a")], **ends(3)}, "late": {"keys": [digest_of("b")], **ends(100)}}
    operators = [{"name": "ann", "keys": [digest_of("c")], **ends(-1)}]
    assert found(tenants=tenants, operators=operators) == [
        (Level.WARNING, "operator ann", "keys have expired on 2026-12-31"),
        (Level.WARNING, "tenant acme", "keys expire in 3 days"),
    ]
