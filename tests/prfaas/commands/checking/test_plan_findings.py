"""What `prfaas check` says of the plan service that a gateway follows."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.config.plan import PlanConfig
from prfaas.commands.checking.findings import Finding, Level
from prfaas.commands.checking.plan_findings import plan_findings
from tests.planner.service.test_peers import HERE, Site, answering
from transport.peers.name import PeerRole

DAY_S = 86_400.0


def of(url: str, site: Site | None = None) -> GatewayConfig:
    nodes = (NodeAddress(agent="127.0.0.1:7001"),)
    config = GatewayConfig(tokenizer_dir=Path("t"), nodes=nodes, plan=PlanConfig(url=url))
    if site is None:
        return config
    own = site.by_role[PeerRole.GATEWAY]
    return replace(config, certificate=own.certificate, key=own.key, authority=own.authority)


def found(config: GatewayConfig, unix_s: float = 0.0) -> list[Finding]:
    return asyncio.run(plan_findings(config, unix_s))


def test_only_this_machine_s_service_is_asked_in_clear() -> None:
    assert found(of("")) == found(of(f"http://{HERE}:8100")) == []
    (clear,) = found(of("http://10.0.0.1:8100"))
    assert (clear.level, "is asked in clear" in clear.what) == (Level.WARNING, True)


def test_the_service_must_show_a_planner_s_certificate(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def asked(role: PeerRole, ahead_s: float) -> Finding:
        async with answering(site.by_role[role]) as (url, _):
            (finding,) = await plan_findings(of(url, site), datetime.now(UTC).timestamp() + ahead_s)
            return finding

    good = asyncio.run(asked(PeerRole.PLANNER, 0.0))
    assert (good.level, "speaks TLS" in good.what) == (Level.OK, True)
    assert asyncio.run(asked(PeerRole.PLANNER, 360 * DAY_S)).level is Level.WARNING
    bad = asyncio.run(asked(PeerRole.PREFILL, 0.0))
    assert bad.level is Level.ERROR
    assert "east/prefill/prefill may not plan.serve" in bad.what
    (gone,) = found(of("https://127.0.0.1:1", site))
    assert (gone.level, "no answer" in gone.what) == (Level.ERROR, True)
