"""What Prometheus is told to scrape is what there is: port by port, with the key that is asked for, and over TLS where it is."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.x509 import load_pem_x509_certificate, load_pem_x509_certificates

from gateway.auth.keyring import Keyring, digest_of
from gateway.config.gateway import GatewayConfig
from gateway.config.gateway import load as load_gateway
from gateway.config.operators import OperatorConfig, OperatorRole
from gateway.config.tenants import TenantConfig
from node.config import NodeConfig, is_loopback, load_node_config
from prfaas.commands.init import InitSite, init, members
from tests.gateway.worlds import on_loop, world
from transport.path.tcp import format_address
from transport.wire.identity import Identity

ROOT = Path(__file__).parent.parent.parent
SITES = [
    InitSite(model="m", gateway="10.0.0.1", remote=("10.1.0.1", "10.1.0.2"), decode=("10.0.0.2", "10.0.0.2")),
    InitSite(model="m", gateway="10.0.0.1", remote=("10.1.0.1",), decode=("fd00::2",), tls=True),
    InitSite(model="m", remote=("10.1.0.1",), decode=("127.0.0.1",)),
]


def jobs_of(file: Path) -> dict[str, dict[str, Any]]:
    return {job["job_name"]: job for job in yaml.safe_load(file.read_text())["scrape_configs"]}


def targets_of(job: dict[str, Any]) -> list[str]:
    return [target for each in job["static_configs"] for target in each["targets"]]


def key_of(job: dict[str, Any], folder: Path) -> str:
    """What it shows; "" for nothing."""
    return (folder / job["authorization"]["credentials_file"]).read_text().strip() if "authorization" in job else ""


def check_scheme(job: dict[str, Any], scheme: str, identity: Identity | None, folder: Path) -> None:
    assert job.get("scheme", "http") == scheme
    if scheme == "https":
        assert identity is not None
        shown = load_pem_x509_certificate(identity.certificate.read_bytes())
        (signer,) = (
            authority
            for authority in load_pem_x509_certificates((folder / job["tls_config"]["ca_file"]).read_bytes())
            if authority.subject == shown.issuer
        )
        shown.verify_directly_issued_by(signer)


def check_gateway(job: dict[str, Any], config: GatewayConfig, folder: Path) -> None:
    assert targets_of(job) == [format_address(config.host, config.metrics_port or config.port)]
    check_scheme(job, config.scheme, config.identity, folder)
    headers = {"Authorization": f"Bearer {key}"} if (key := key_of(job, folder)) else {}
    Keyring(config.tenants, config.all_operators).check_operator(headers)


def check_node(job: dict[str, Any], target: str, config: NodeConfig, folder: Path) -> None:
    port = config.port("metrics")
    assert target == format_address(port.host, port.number)
    assert is_loopback(port.host) or config.metrics_key
    is_secure = config.identity is not None and bool(config.metrics_key)
    check_scheme(job, "https" if is_secure else "http", config.identity, folder)
    if config.metrics_key:
        assert digest_of(key_of(job, folder)) in Path(config.metrics_key).read_text().split()


@pytest.mark.parametrize("site", SITES, ids=["several", "tls", "gateway here"])
def test_a_site_of_init_is_scraped_target_by_target(site: InitSite, tmp_path: Path) -> None:
    init(site, tmp_path, overwrite=False, say=lambda _: None)
    jobs = jobs_of(tmp_path / "prometheus.yml")
    check_gateway(jobs["prfaas-gateway"], load_gateway(tmp_path / "gateway.toml"), tmp_path)
    nodes = [load_node_config(tmp_path / f"{member.name}.toml") for member in members(site)]
    for target, config in zip(targets_of(jobs["prfaas-node"]), nodes, strict=True):
        check_node(jobs["prfaas-node"], target, config, tmp_path)
    assert (tmp_path / "prometheus.key").stat().st_mode & 0o777 == 0o600


def test_the_shipped_file_scrapes_the_shipped_configuration_target_by_target() -> None:
    folder = ROOT / "deploy" / "prometheus"
    jobs = jobs_of(folder / "prometheus.yml")
    check_gateway(jobs["prfaas-gateway"], load_gateway(ROOT / "configs" / "hosts" / "gateway.toml"), folder)
    names = ("east-p0", "west-p0", "west-d0")
    nodes = [load_node_config(ROOT / "configs" / "hosts" / f"{name}.toml") for name in names]
    for target, config in zip(targets_of(jobs["prfaas-node"]), nodes, strict=True):
        check_node(jobs["prfaas-node"], target, config, folder)


def test_jobs_have_the_names_that_alerts_know(tmp_path: Path) -> None:
    init(SITES[0], tmp_path, overwrite=False, say=lambda _: None)
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    for name in jobs_of(tmp_path / "prometheus.yml"):
        assert f'job="{name}"' in rules


@on_loop
async def test_a_healthy_gateway_shows_prometheus_what_alerts_ask(tmp_path: Path) -> None:
    init(SITES[0], tmp_path, overwrite=False, say=lambda _: None)
    job = jobs_of(tmp_path / "prometheus.yml")["prfaas-gateway"]
    key = key_of(job, tmp_path)
    operators = (OperatorConfig(name="prometheus", keys=(digest_of(key),), role=OperatorRole.VIEWER),)
    tenants = {"first": TenantConfig(keys=(digest_of("sk-first"),))}
    async with world(tenants=tenants, operators=operators) as w:
        async with w.http.get("/metrics", headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200
            assert 'role="decode",state="ready"} 2.0' in await answer.text()
        async with w.http.get("/metrics") as answer:
            assert answer.status == 401
