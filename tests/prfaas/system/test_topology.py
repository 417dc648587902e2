from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gateway.config.gateway import GatewayConfig
from prfaas.errors import TopologyError
from prfaas.system.topology import DEFAULT_FILE, load_topology, parse_topology
from transport.control.settings import build


def document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"arch": "llama"},
        "clusters": [
            {"name": "far", "kind": "prfaas", "nodes": [{"node_id": "p0", "role": "prefill"}]},
            {"name": "near", "kind": "pd", "nodes": [{"node_id": "d0", "role": "decode", "chunk_tokens": 64}]},
        ],
    }
    return base | changes


def test_the_shipped_file_has_both_kinds_of_cluster() -> None:
    topology = load_topology(DEFAULT_FILE, Path("state"))
    assert {(node.cluster_kind, node.role) for node in topology.nodes} == {
        ("prfaas", "prefill"),
        ("pd", "prefill"),
        ("pd", "decode"),
    }


def test_common_settings_reach_every_node_and_its_own_win() -> None:
    topology = parse_topology(document(node={"chunk_tokens": 32, "cache_bytes": 1 << 20}), Path("state"))
    assert [(node.node_id, node.cluster, node.chunk_tokens, node.cache_bytes) for node in topology.nodes] == [
        ("p0", "far", 32, 1 << 20),
        ("d0", "near", 64, 1 << 20),
    ]
    assert topology.nodes[0].model.endswith("/state/models/llama-0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"modell": {}},
            r"unknown key 'modell' .did you mean 'model'\?\); known are clusters, gateway, links, model, node",
        ),
        ({"model": {}}, "give exactly one"),
        ({"model": {"arch": "gpt5"}}, r"\[model\]: arch = 'gpt5': must be 'kimi_linear', "),
        ({"model": {"arch": "llama", "seed": "x"}}, r"\[model\]: seed = 'x': must be an integer"),
        ({"clusters": []}, "no node has role = 'decode'"),
        ({"clusters": {}}, "clusters = {}: must be an array"),
        ({"node": {"chunk_tokens": 0}}, r"chunk_tokens = 0: must be 1 to"),
        ({"node": {"chunk_token": 1}}, r"unknown key 'chunk_token'"),
        ({"node": {"chunk_tokens": "many"}}, r"clusters.0..nodes.0.: chunk_tokens = 'many': must be an integer"),
        ({"gateway": {"prot": 1}}, r"\[gateway\]: unknown key 'prot' \(did you mean 'port'\?\)"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(document(**changes), Path("state"))


def test_one_word_switches_on_encryption_and_certificates_for_everybody() -> None:
    topology = parse_topology(document(node={"integrity": "aead"}), Path("state"))
    assert topology.certificates == Path("state/certificates")
    assert [Path(node.certificate).name for node in topology.nodes] == ["p0.pem", "d0.pem"]
    assert topology.gateway["key"] == str(Path("state/certificates/gateway.key").absolute())
    assert parse_topology(document(), Path("state")).certificates is None


def test_certificates_of_ones_own_are_used(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(
        '[model]\narch = "llama"\n[node]\nintegrity = "aead"\ncertificate = "n.pem"\nkey = "n.key"\n'
        'authority = "/ca.pem"\n[[clusters]]\nname = "c"\nkind = "pd"\nnodes = [{ node_id = "d", role = "decode" }]\n'
    )
    with pytest.raises(TopologyError, match=r"\[gateway\]: certificate, key, authority: missing; nodes with"):
        load_topology(path, Path("state"))
    path.write_text(path.read_text() + '[gateway]\ncertificate = "g.pem"\nkey = "g.key"\nauthority = "/ca.pem"\n')
    topology = load_topology(path, Path("state"))
    assert topology.certificates is None
    assert (topology.nodes[0].certificate, topology.nodes[0].authority) == (str(tmp_path / "n.pem"), "/ca.pem")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node]\nnode_id = 'x'", "topology.toml: this is a node's file, for `prfaas node`"),
        ("[gateway]\nnodes = [{ agent = 'a:1' }]", "topology.toml: this is a gateway's file, for `prfaas gateway`"),
        ("[node]", r"topology.toml: this is no topology: it has no \[\[clusters\]\]"),
    ],
)
def test_another_kind_of_file_is_called_what_it_is(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=message):
        load_topology(path, Path("state"))


def test_a_node_may_have_a_model_of_its_own(tmp_path: Path) -> None:
    own = {"node_id": "d1", "role": "decode", "model": "models/coder"}
    clusters = [*document()["clusters"], {"name": "third", "kind": "pd", "nodes": [own]}]
    topology = parse_topology(document(clusters=clusters), Path("state"))
    found = {node.node_id: (node.model, node.served_model) for node in topology.nodes}
    assert found["d1"] == ("models/coder", "coder")
    assert found["d0"][0].endswith("/state/models/llama-0")
    file = tmp_path / "site.toml"
    table = {"name": "coder", "tokenizer_dir": "models/coder"}
    file.write_text(tomli_w.dumps(document(clusters=clusters, gateway={"models": [table]})))
    topology = load_topology(file, Path("state"))
    assert topology.nodes[-1].model == str(tmp_path / "models" / "coder")
    assert topology.gateway["models"][0]["tokenizer_dir"] == str(tmp_path / "models" / "coder")


def test_node_ids_are_unique() -> None:
    clusters = document()["clusters"]
    clusters[1]["nodes"][0]["node_id"] = "p0"
    with pytest.raises(TopologyError, match="node_id = 'p0' is used 2 times"):
        parse_topology(document(clusters=clusters), Path("state"))


def test_a_prfaas_cluster_does_not_decode() -> None:
    clusters = document()["clusters"]
    clusters[0]["nodes"][0]["role"] = "decode"
    with pytest.raises(TopologyError, match="nodes of a PrfaaS cluster only prefill"):
        parse_topology(document(clusters=clusters), Path("state"))


def emulated(**changes: Any) -> dict[str, Any]:
    """A profile instead of a model, and a link between its clusters."""
    base = document(
        model={"profile": "m.json", "time_scale": 0.25, "byte_scale": 0.001},
        links=[{"source": "far", "destination": "near", "capacity_gbps": 100}],
    )
    far, near = base["clusters"]
    far |= {"hardware": "fast", "nodes": [{"node_id": f"p{number}", "role": "prefill"} for number in range(4)]}
    near |= {"hardware": "cheap"}
    return base | changes


def test_a_profile_is_emulated_by_every_node_on_its_clusters_hardware() -> None:
    nodes = parse_topology(emulated(), Path("state")).nodes
    assert {node.engine for node in nodes} == {"emulated"}
    assert nodes[0].model.endswith("/state/models/profile-m/fast.json")
    assert nodes[-1].model.endswith("/state/models/profile-m/cheap.json")


def test_the_gateway_reads_the_lines_of_a_topology() -> None:
    links = [
        {
            "source": "far",
            "destination": "near",
            "name": name,
            "capacity_gbps": 50,
            "shared_gbps": 10,
            "price_per_gb": 0.02,
        }
        for name in ("a", "b")
    ]
    system = parse_topology(emulated(links=links), Path("state"))
    assert [node.budgets()["near"] for node in system.nodes[:4]] == [pytest.approx(80e9 / 8 * 0.001 / 0.25 / 4)] * 4
    minimal = {"tokenizer_dir": ".", "nodes": [{"agent": "127.0.0.1:1"}]}
    first, second = build(GatewayConfig, {**minimal, **system.gateway}, "[gateway]").lines
    assert (first.label, second.label, first.price_per_gb) == ("a", "b", 0.02)
    assert first.bytes_per_s == pytest.approx(40e9 / 8 * 0.001 / 0.25)
    own = {"lines": [{"source": "far", "destination": "near", "capacity_gbps": 1}]}
    assert parse_topology(emulated(links=links, gateway=own), Path("state")).gateway["lines"] == own["lines"]


def test_the_senders_of_a_link_share_it() -> None:
    nodes = parse_topology(emulated(), Path("state")).nodes
    assert [node.budgets()["near"] for node in nodes[:4]] == [pytest.approx(100e9 / 8 * 0.001 / 0.25 / 4)] * 4
    assert "near" not in nodes[-1].budgets()


def test_a_plan_service_is_told_what_the_tables_say() -> None:
    assert parse_topology(emulated(), Path("state")).plan is None
    plan = parse_topology(emulated(plan={"mode": "auto"}), Path("state")).plan
    assert plan == {
        "mode": "auto", "profile": "m.json", "pd_hardware": "cheap", "prfaas_hardware": "fast", "egress_gbps": 100,
        "time_scale": 0.25, "token_scale": 1.0, "byte_scale": 0.001,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": {"mod": "auto"}}, r"\[plan\]: unknown key 'mod'"),
        ({"plan": {"controller": {"tick_s": 0}}}, "need tick_s > 0"),
        ({"plan": {}, "model": {"arch": "llama"}, "links": []}, "profile is missing"),
    ],
)
def test_what_is_wrong_with_a_plan_service_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(emulated(**changes), Path("state"))


def test_what_a_node_says_of_its_egress_counts_more() -> None:
    table = emulated()
    table["clusters"][0]["nodes"][0]["egress_bytes_per_s"] = 7.0
    assert parse_topology(table, Path("state")).nodes[0].egress_bytes_per_s == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"profile": "m.json", "arch": "llama"}}, "exactly one"),
        ({"model": {"arch": "llama", "time_scale": 0.5}}, "only with a profile"),
        ({"model": {"profile": "m.json", "byte_scale": 0}}, "byte_scale = 0"),
        ({"node": {"engine": "vllm"}}, "can only be emulated"),
        ({"links": [{"source": "afar", "destination": "near", "capacity_gbps": 1}]}, "links = 'afar'"),
        ({"links": [{"source": "far", "destination": "near", "capacity_gbps": 0}]}, "capacity_gbps = 0"),
        ({"clusters": document()["clusters"]}, "'far' names no hardware"),
    ],
)
def test_what_is_wrong_with_an_emulation_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(emulated(**changes), Path("state"))


def test_a_profile_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    live = Path(__file__).parents[3] / "configs" / "case_study_live.toml"
    assert Path(load_topology(live, tmp_path).model.profile).is_file()


@pytest.mark.parametrize(("said", "meant"), [("ssd.key", "{}/ssd.key"), ("boot", "boot")])
def test_the_key_of_disks_is_relative_to_the_file_that_names_it(tmp_path: Path, said: str, meant: str) -> None:
    file, node = tmp_path / "site.toml", f'ssd_dir = "/ssd"\nssd_bytes = 1073741824\nssd_key = "{said}"'
    cluster = 'name = "a"\nkind = "pd"\nnodes = [{ node_id = "d0", role = "decode" }]'
    file.write_text(f'[model]\narch = "llama"\n[node]\n{node}\n[[clusters]]\n{cluster}\n')
    assert {each.ssd_key for each in load_topology(file, tmp_path).nodes} == {meant.format(tmp_path)}


def test_what_processes_are_told_does_not_depend_on_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    plan = load_topology(Path("configs") / "case_study_live.toml", Path("state")).plan
    assert plan is not None
    assert Path(plan["profile"]).is_absolute()
    assert Path(plan["profile"]).exists()
