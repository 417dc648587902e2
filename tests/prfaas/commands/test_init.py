"""What `prfaas init` writes is what the programs that read it take."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.auth.keyring import Keyring
from gateway.config.gateway import GatewayConfig
from gateway.config.gateway import load as load_gateway
from gateway.config.operators import OperatorRole
from gateway.errors import Unauthorised
from hybrid_cache.hashing.name_secrets import NameSecrets
from node.config import load_node_config
from planner.service.config import load as load_plan
from prfaas.cli import main
from prfaas.commands.init import QUESTIONS, FirstKeys, InitSite, asked, files, init, members, site_of
from prfaas.commands.site_files.model_tables import SiteModel
from prfaas.errors import InitError
from prfaas.system.topology import load_topology
from transport.control.certificates import Authority
from transport.peers.name import PeerRole

SEVERAL = InitSite(
    model="models/m", gateway="10.0.0.1", remote=("10.1.0.1", "10.1.0.2"), prefill=("10.0.0.2",), decode=("10.0.0.2", "d.lan")
)  # fmt: skip


def write(site: InitSite, folder: Path) -> list[str]:
    said: list[str] = []
    init(site, folder, overwrite=False, say=said.append)
    return said


def test_one_machine_gets_one_file_that_up_takes(tmp_path: Path) -> None:
    said = write(InitSite(model=str(tmp_path / "m"), tls=True), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prfaas.toml"]
    topology = load_topology(tmp_path / "prfaas.toml", tmp_path)
    assert [node.node_id for node in topology.nodes] == ["remote-p0", "home-d0"]
    assert topology.nodes[0].integrity == "aead"
    assert topology.certificates is not None
    assert any("prfaas model build" in line for line in said)


def test_several_machines_get_a_file_for_each_process(tmp_path: Path) -> None:
    said = write(SEVERAL, tmp_path)
    gateway = load_gateway(tmp_path / "gateway.toml")
    tenants, operators = (
        {"Authorization": f"Bearer {line.rpartition(' ')[2]}"}
        for begin in ("API key", "Operator's key")
        for line in said
        if line.startswith(begin)
    )
    keyring = Keyring(gateway.tenants, gateway.all_operators)
    assert keyring.tenant(tenants).name == "first"
    assert keyring.check_operator(operators, OperatorRole.ADMIN).name == "first-operator"
    assert not keyring.is_operator(tenants)
    with pytest.raises(Unauthorised):
        keyring.tenant(operators)
    assert [node.agent for node in gateway.nodes] == [
        "10.1.0.1:7001", "10.1.0.2:7001", "10.0.0.2:7001", "10.0.0.2:7002", "d.lan:7001",
    ]  # fmt: skip
    for member in members(SEVERAL):
        node = load_node_config(tmp_path / f"{member.name}.toml")
        assert (node.node_id, node.role, node.cluster_kind, node.host) == (
            member.name, member.role, member.kind, member.host,
        )  # fmt: skip
        assert node.model == str(tmp_path / "models/m")
    start = (tmp_path / "START.md").read_text()
    assert all(f"prfaas node -c {member.name}.toml" in start for member in members(SEVERAL))


def models_of(gateway: GatewayConfig) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By the name for clients: the folder of the tokenizer, and how nodes call the model."""
    rest = {gateway.served_model: (str(gateway.tokenizer_dir), ())}
    return rest | {each.name: (str(each.tokenizer_dir), each.announced) for each in gateway.models}


def test_each_model_has_a_table_and_nodes_of_its_own_on_every_machine(tmp_path: Path) -> None:
    more = (SiteModel("models/coder"), SiteModel("models/m2", "org/big"))
    site = replace(SEVERAL, model="models/m", name="chat", more_models=more)
    write(site, tmp_path)
    gateway = load_gateway(tmp_path / "gateway.toml")
    assert models_of(gateway) == {
        "chat": (str(tmp_path / "models/m"), ()),
        "coder": (str(tmp_path / "models/coder"), ("coder",)),
        "org/big": (str(tmp_path / "models/m2"), ("org/big",)),
    }
    nodes = [load_node_config(tmp_path / f"{each.name}.toml") for each in members(site)]
    assert len({(node.host, node.control_port) for node in nodes}) == len(nodes) == 3 * len(members(SEVERAL))
    assert [each.agent for each in gateway.nodes] == [f"{node.host}:{node.control_port}" for node in nodes]
    for host in {node.host for node in nodes if node.role == "decode"}:
        here = {(node.served_model, node.model) for node in nodes if (node.host, node.role) == (host, "decode")}
        assert {name for name, _ in here} == {"chat", "coder", "org/big"}
        assert {gateway.catalog.of_node(name) for name, _ in here} == {"", "coder", "org/big"}
    assert "models/coder" in (tmp_path / "START.md").read_text()


def test_models_on_one_machine_are_what_up_takes(tmp_path: Path) -> None:
    command = ["init", str(tmp_path), "--yes", "--prefill", "-", "--remote", "-"]
    main([*command, "--model", f"chat={tmp_path / 'm'}", "--model", f"coder={tmp_path / 'c'}"])
    topology = load_topology(tmp_path / "prfaas.toml", tmp_path)
    served = {node.node_id: (node.served_model, node.model) for node in topology.nodes}
    assert served == {"home-d0": ("chat", str(tmp_path / "m")), "home-d1": ("coder", str(tmp_path / "c"))}
    assert [(each["name"], each["tokenizer_dir"]) for each in topology.gateway["models"]] == [
        ("coder", str(tmp_path / "c"))
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a=m", "a=n"], "two have this name"),
        (["x/m", "y/m"], "models m: two"),
        (["m", "=n"], "NAME=DIR"),
        (["a="], "NAME=DIR"),
    ],
)
def test_models_that_cannot_be_told_apart_are_named(given: list[str], message: str) -> None:
    with pytest.raises(InitError, match=message):
        site_of(
            asked({"model": given[0]}, lambda _, default: default),
            tls=False,
            more_models=[SiteModel.parse(each) for each in given[1:]],
        )


def test_certificates_are_made_for_all_and_named_in_their_files(tmp_path: Path) -> None:
    site = InitSite(model="m", remote=("10.1.0.1",), tls=True)
    write(site, tmp_path)
    gateway = load_gateway(tmp_path / "gateway.toml")
    assert gateway.identity is not None
    gateway.identity.check()
    assert [node.name for node in gateway.nodes] == ["remote-p0", "home-d0"]
    node = load_node_config(tmp_path / "remote-p0.toml")
    assert node.identity is not None
    node.identity.check()
    assert (gateway.scheme, node.plain_listeners) == ("http", ())  # the gateway is for its own machine


def test_with_certificates_a_gateway_that_others_reach_speaks_https(tmp_path: Path) -> None:
    write(InitSite(model="m", gateway="10.0.0.1", remote=("10.1.0.1",), tls=True), tmp_path)
    gateway = load_gateway(tmp_path / "gateway.toml")
    assert (gateway.scheme, gateway.is_in_clear) == ("https", False)
    assert gateway.tls_certificate == gateway.identity.certificate if gateway.identity else None
    write(InitSite(model="m", gateway="10.0.0.1", remote=("10.1.0.1",)), tmp_path / "plain")
    assert load_gateway(tmp_path / "plain" / "gateway.toml").scheme == "http"


def test_two_nodes_of_a_machine_have_ports_of_their_own() -> None:
    texts = files(SEVERAL, FirstKeys("p"))
    assert "control_port = 7001" in texts["home-p0.toml"]
    assert "control_port = 7002" in texts["home-d0.toml"]


def test_files_that_are_there_are_kept_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "gateway.toml").write_text("mine")
    with pytest.raises(InitError, match=r"gateway\.toml: already there; --overwrite"):
        write(SEVERAL, tmp_path)
    assert (tmp_path / "gateway.toml").read_text() == "mine"
    assert not (tmp_path / "START.md").exists()
    init(SEVERAL, tmp_path, overwrite=True, say=lambda _: None)
    assert load_gateway(tmp_path / "gateway.toml").host == "10.0.0.1"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"decode": "-"}, "no decode node"),
        ({"engine": "llama"}, "engine 'llama': must be one of embedded, vllm, sglang"),
        ({"engine": "sglang", "remote": "-"}, "engine 'sglang': its decode nodes compute no prompts"),
        ({"remote": "10.0.0.1,,x"}, "host ''"),
        ({"gateway": "a b"}, "host 'a b'"),
    ],
)
def test_answers_that_make_no_system_are_named(answers: dict[str, str], message: str) -> None:
    with pytest.raises(InitError, match=message):
        site_of(asked(answers, lambda _, default: default), tls=False)


def test_an_sglang_site_has_a_port_where_decode_nodes_ask(tmp_path: Path) -> None:
    site = InitSite(model="m", engine="sglang", gateway="10.0.0.1", remote=("10.0.0.2",), decode=("10.0.0.3",))
    write(site, tmp_path)
    ports = {member.role: load_node_config(tmp_path / f"{member.name}.toml").bootstrap_port for member in members(site)}
    assert ports == {"prefill": 7501, "decode": 0}
    with pytest.raises(InitError, match="TLS is not possible"):
        InitSite(model="m", engine="sglang", tls=True)


def test_only_what_is_not_known_is_asked() -> None:
    questions: list[str] = []

    def ask(question: str, default: str) -> str:
        questions.append(question)
        return ""

    site = site_of(asked({"model": "m", "remote": "-"}, ask), tls=False)
    assert len(questions) == len(QUESTIONS) - 2
    assert (site.model, site.remote, site.is_one_machine) == ("m", (), True)


def test_addresses_of_ipv6_are_in_brackets_beside_ports(tmp_path: Path) -> None:
    write(
        InitSite(model="models/m", gateway="2001:db8::9", remote=("2001:db8::2",), decode=("2001:db8::1", "d.lan")),
        tmp_path,
    )
    gateway = load_gateway(tmp_path / "gateway.toml")
    assert {node.agent for node in gateway.nodes} == {"[2001:db8::1]:7001", "[2001:db8::2]:7001", "d.lan:7001"}
    assert load_node_config(tmp_path / "home-d0.toml").host == "2001:db8::1"


def test_start_names_each_file_that_a_process_reads(tmp_path: Path) -> None:
    site = InitSite(model="/m", gateway="10.0.0.1", remote=("10.1.0.1",), decode=("10.0.0.2",), tls=True)
    write(site, tmp_path)
    start = (tmp_path / "START.md").read_text()
    rows = [line for line in start.splitlines() if line.startswith("| 10.")]
    named = [set(re.findall("`(certificates/[^`]*)`", row)) for row in rows]
    assert named == [
        {f"certificates/{name}.pem", f"certificates/{name}.key"} for name in ("remote-p0", "home-d0", "gateway")
    ]
    assert all((tmp_path / file).exists() for file in re.findall("`(certificates/[^`]*)`", start))
    assert "`prometheus.key`, `certificates/authority.pem`" in start


def test_start_says_what_a_firewall_between_the_clusters_lets_through_and_what_to_ask_first(tmp_path: Path) -> None:
    site = InitSite(model="/m", gateway="10.0.0.1", remote=("10.1.0.1",), decode=("10.0.0.2", "10.0.0.2"), tls=True)
    write(site, tmp_path)
    start = (tmp_path / "START.md").read_text()
    through = "- from 10.0.0.1 to 10.1.0.1: 7001, 7401, 7201\n"
    landings = "- from 10.1.0.1 to 10.0.0.2: 7101\n- from 10.1.0.1 to 10.0.0.2: 7102\n"
    assert f"must let these connections through:\n\n{through}{landings}\n" in start
    url = "https://10.0.0.1:8000/v1/models"
    assert f"    curl --cacert certificates/authority.pem -H 'Authorization: Bearer KEY' {url}\n" in start
    write(InitSite(model="/m", gateway="10.0.0.1", remote=("10.0.0.1",), decode=("10.0.0.2",)), tmp_path / "one")
    start = (tmp_path / "one" / "START.md").read_text()
    assert "firewall" not in start
    assert "    curl -H 'Authorization: Bearer KEY' http://10.0.0.1:8000/v1/models\n" in start


def test_with_certificates_all_name_blocks_by_one_secret_that_others_cannot_read(tmp_path: Path) -> None:
    site = InitSite(model="/m", gateway="10.0.0.1", remote=("10.1.0.1",), decode=("10.0.0.2",), tls=True)
    write(site, tmp_path)
    file = tmp_path / "names.secret"
    assert file.stat().st_mode & 0o077 == 0
    assert len(NameSecrets.of(file.read_text()).secrets[0]) == 32
    assert load_gateway(tmp_path / "gateway.toml").names_secret == file
    assert {load_node_config(tmp_path / f"{each.name}.toml").names_secret for each in members(site)} == {str(file)}
    rows = [line for line in (tmp_path / "START.md").read_text().splitlines() if line.startswith("| 10.")]
    assert all("`names.secret`" in row for row in rows)
    write(InitSite(model="/m", gateway="10.0.0.1", remote=("10.1.0.1",)), tmp_path / "plain")
    assert not (tmp_path / "plain" / "names.secret").exists()


def test_each_cluster_has_an_authority_that_signs_for_it_alone(tmp_path: Path) -> None:
    site = InitSite(model="/m", gateway="10.0.0.1", remote=("10.1.0.1",), decode=("10.0.0.2",), tls=True)
    write(site, tmp_path)
    identities = [
        load_gateway(tmp_path / "gateway.toml").identity,
        *(load_node_config(tmp_path / f"{each.name}.toml").identity for each in members(site)),
    ]
    for identity in identities:
        assert identity is not None
        identity.check()
        assert identity.guard()  # which looks at its own name
    lines = (tmp_path / "certificates" / "authorities").read_text().splitlines()[1:]
    assert lines == [
        "any/authority.pem any/gateway any/operator any/planner",
        "remote/authority.pem remote/prefill",
        "home/authority.pem home/node",
    ]
    both = (tmp_path / "certificates" / "authority.pem").read_text()  # for clients that compare hosts alone
    assert both.count("BEGIN CERTIFICATE") == len(lines)
    start = (tmp_path / "START.md").read_text()
    assert "Never copy `certificates/any/authority.key`, `certificates/remote/authority.key`" in start


def test_a_site_with_one_authority_keeps_it(tmp_path: Path) -> None:
    Authority(tmp_path / "certificates")
    before = (tmp_path / "certificates" / "authority.pem").read_bytes()
    write(InitSite(model="/m", gateway="10.0.0.1", remote=("10.1.0.1",), decode=("10.0.0.2",), tls=True), tmp_path)
    gateway = load_gateway(tmp_path / "gateway.toml")
    assert gateway.authority == tmp_path / "certificates" / "authority.pem"
    assert gateway.authority.read_bytes() == before
    assert not (tmp_path / "certificates" / "authorities").exists()
    assert "Never copy `certificates/authority.key`:" in (tmp_path / "START.md").read_text()


def test_a_plan_service_and_its_gateway_ask_each_other_over_tls(tmp_path: Path) -> None:
    site = InitSite(model="/m", gateway="10.0.0.1", remote=("10.1.0.1",), decode=("10.0.0.2",), tls=True)
    write(site, tmp_path)
    chosen = f'profile = "{tmp_path}/p.json"\npd_hardware = "h20x8"'
    text = (tmp_path / "plan.toml").read_text().replace("# profile", f"{chosen}\n# profile")
    (tmp_path / "plan.toml").write_text(text)
    plan = load_plan(tmp_path / "plan.toml")
    guard = plan.peers()
    assert guard is not None
    assert (guard.own.role, plan.gateways, plan.host) == (PeerRole.PLANNER, ("https://10.0.0.1:8000",), "10.0.0.1")
    gateway = load_gateway(tmp_path / "gateway.toml")
    key = {"Authorization": f"Bearer {plan.gateway_key()}"}
    assert Keyring(gateway.tenants, gateway.all_operators).check_operator(key, OperatorRole.VIEWER).name == "planner"
    assert (tmp_path / "plan.key").stat().st_mode & 0o077 == 0
    followed = re.sub("# (.gateway.plan.|url|plan_file)", r"\1", (tmp_path / "gateway.toml").read_text())
    (tmp_path / "gateway.toml").write_text(followed)
    assert load_gateway(tmp_path / "gateway.toml").plan.url == "https://10.0.0.1:8100"


def test_a_relative_model_is_where_the_command_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "site", "--model", "models/m", "--remote", "10.1.0.1", "--plain", "--yes"]) == 0
    assert load_node_config(tmp_path / "site/remote-p0.toml").model == str(tmp_path / "models/m")
    assert load_gateway(tmp_path / "site/gateway.toml").tokenizer_dir == tmp_path / "models/m"
