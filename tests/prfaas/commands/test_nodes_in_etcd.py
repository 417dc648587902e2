"""`prfaas nodes` and `prfaas check` where a gateway's nodes are in etcd."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config.gateway import load
from membership.etcd.entry import EtcdEntry
from membership.etcd.settings import EtcdConfig
from membership.member import Member
from node.config import load_node_config
from node.errors import NodeConfigError
from prfaas.cli import main
from prfaas.commands.checking.file_modes import open_files
from prfaas.commands.checking.findings import Level, OpenFile
from prfaas.commands.checking.member_findings import etcd_findings
from tests.membership.etcd.double import EtcdDouble
from tests.membership.etcd.servers import Clock

GATEWAY = """[gateway]
tokenizer_dir = "tokenizer"
[gateway.membership.etcd]
"""
NODE = """[node]
node_id = "d0"
cluster = "west"
cluster_kind = "pd"
role = "decode"
model = "llama"
engine = "emulated"
"""


@pytest.fixture
def etcd() -> Iterator[EtcdDouble]:
    double = EtcdDouble(Clock())
    double.start()
    yield double
    double.stop()


def written(folder: Path, etcd: EtcdDouble, more: str = "") -> Path:
    file = folder / "gateway.toml"
    file.write_text(f'{GATEWAY}endpoints = ["{etcd.endpoint}"]\n{more}')
    return file


def nodes(file: Path, *words: str) -> int:
    return main(["nodes", *words, "-c", str(file)])


def test_nodes_are_added_listed_and_removed(
    tmp_path: Path, etcd: EtcdDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, etcd)
    own = EtcdEntry(EtcdConfig(endpoints=(etcd.endpoint,)), Member(id="p0", agent="127.0.0.1:7002"))
    own.write()
    assert nodes(file, "add", "d0", "127.0.0.1:7001", "--role", "decode", "--label", "rack=b4") == 0
    said = capsys.readouterr().out
    assert "etcd /prfaas/nodes/listed/: d0 is listed at 127.0.0.1:7001" in said
    assert "gateways that watch etcd ask its agent now" in said
    assert nodes(file, "list", "--json") == 0
    found = json.loads(capsys.readouterr().out)["nodes"]
    assert [(each["id"], each["source"]) for each in found] == [("p0", "etcd"), ("d0", "etcd")]
    assert found[1]["labels"] == {"rack": "b4"}
    assert nodes(file, "remove", "d0") == 0
    own.remove()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("add", "d1", "127.0.0.1"), "must be host:port"),
        (("add", "d0", "127.0.0.1:7002"), "d0 at 127.0.0.1:7001 is listed already"),
        (("add", "d1", "127.0.0.1:7001"), "d0 at 127.0.0.1:7001 is listed already"),
        (("add", "d1", "192.0.2.7:7001"), "would be in clear"),
        (("remove", "d7"), "has no d7; etcd lists d0"),
        (("remove", "d0"), "is the last node"),
    ],
)
def test_nonsense_is_refused(
    tmp_path: Path, etcd: EtcdDouble, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    file = written(tmp_path, etcd)
    assert nodes(file, "add", "d0", "127.0.0.1:7001") == 0
    before = etcd.state.revision
    assert nodes(file, *words) == 2
    assert why in capsys.readouterr().err
    assert etcd.state.revision == before


def test_an_etcd_that_is_gone_is_told_in_a_sentence(
    tmp_path: Path, etcd: EtcdDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, etcd)
    etcd.stop()
    gone = f"etcd does not answer: 127.0.0.1:{etcd.port}: connection refused"
    assert nodes(file, "list") == 1
    assert gone in capsys.readouterr().out
    assert nodes(file, "add", "d0", "127.0.0.1:7001") == 2
    assert gone in capsys.readouterr().err
    etcd.start()


def test_ways_in_clear_and_secrets_that_others_read_are_told(tmp_path: Path, etcd: EtcdDouble) -> None:
    plain = EtcdConfig(endpoints=("10.0.0.1:2379", "127.0.0.1:2379"))
    for has_identity, level in ((False, Level.ERROR), (True, Level.WARNING)):
        (found,) = etcd_findings(plain, has_identity)
        assert (found.level, "etcd at 10.0.0.1:2379 is another machine" in found.what) == (level, True)
    assert list(etcd_findings(None, False)) == []
    password = tmp_path / "password"
    password.write_text("secret")
    password.chmod(0o640)
    config = load(written(tmp_path, etcd, 'user = "gateway"\npassword_file = "password"\n'))
    assert OpenFile(str(password), 0o640) in open_files(config)


def test_paths_of_a_node_s_etcd_are_relative_to_its_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    table = '[node.etcd]\nendpoints = ["etcd:2379"]\nauthority = "ca.pem"\n'
    file.write_text(NODE + table)
    config = load_node_config(file)
    assert config.etcd is not None
    assert config.etcd.authority == tmp_path / "ca.pem"
    file.write_text(f'{NODE}host = "0.0.0.0"\nplain = true\n{table}')
    with pytest.raises(NodeConfigError, match="etcd: control_advertise is missing"):
        load_node_config(file)


def test_configurations_without_etcd_do_not_load_its_messages() -> None:
    loads = "import gateway.config.membership, membership.registration, node.config, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert "membership.etcd.settings" in done.stdout
    assert "etcd_pb2" not in done.stdout
