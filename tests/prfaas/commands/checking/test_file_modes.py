"""Which modes of files `prfaas check` warns of."""

from pathlib import Path

from gateway.config.fleet import FleetConfig
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.config.membership import MembershipConfig
from membership.etcd.settings import EtcdConfig
from membership.kubernetes.settings import KubernetesConfig
from membership.member import Member
from membership.registration import FolderEntry
from prfaas.commands.checking.file_modes import open_files
from prfaas.commands.checking.findings import CheckFindings, Level, OpenFile, findings
from tests.transport.peers.two_sites import TwoSites


def of(path: Path, mode: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.chmod(mode)
    return path


def test_a_secret_that_others_can_read_is_told(tmp_path: Path) -> None:
    secret = of(tmp_path / "names", 0o640)
    config = GatewayConfig(tokenizer_dir=tmp_path, names_secret=secret, nodes=(NodeAddress(agent="127.0.0.1:7001"),))
    assert open_files(config) == [OpenFile(str(secret), 0o640)]
    secret.chmod(0o600)
    assert open_files(config) == []


def test_a_token_of_the_api_server_is_a_secret_and_its_authority_is_trusted(tmp_path: Path) -> None:
    token, authority = of(tmp_path / "token", 0o644), of(tmp_path / "ca.crt", 0o644)
    tmp_path.chmod(0o755)
    kubernetes = KubernetesConfig(selector="app=prfaas", token_file=token, authority=authority)
    config = GatewayConfig(tokenizer_dir=tmp_path, membership=MembershipConfig(kubernetes=kubernetes))
    assert open_files(config) == [OpenFile(str(token), 0o644)]
    token.chmod(0o600)
    authority.chmod(0o666)
    assert open_files(config) == [OpenFile(str(authority), 0o666, is_written=True)]


def test_secrets_and_authorities_for_the_etcd_of_a_fleet_are_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    key, password = of(tmp_path / "etcd.key", 0o640), of(tmp_path / "password", 0o604)
    authority, certificate = of(tmp_path / "etcd.pem", 0o664), of(tmp_path / "etcd.crt", 0o644)
    etcd = EtcdConfig(
        endpoints=("10.0.0.5:2379",),
        authority=authority,
        certificate=certificate,
        key=key,
        user="gateway",
        password_file=password,
    )
    config = GatewayConfig(
        tokenizer_dir=tmp_path, fleet=FleetConfig(etcd=etcd), nodes=(NodeAddress(agent="127.0.0.1:7001"),)
    )
    assert open_files(config) == [
        OpenFile(str(key), 0o640),
        OpenFile(str(password), 0o604),
        OpenFile(str(authority), 0o664, is_written=True),
    ]


def test_registries_that_others_can_write_are_told(tmp_path: Path) -> None:
    file, fleet = of(tmp_path / "nodes.toml", 0o644), tmp_path / "fleet"
    fleet.mkdir()
    FolderEntry(fleet, Member(id="p0", agent="10.0.0.7:7001")).write()
    tmp_path.chmod(0o755)
    fleet.chmod(0o755)
    config = GatewayConfig(tokenizer_dir=tmp_path, membership=MembershipConfig(file=file, folder=fleet))
    assert open_files(config) == []
    file.chmod(0o664)
    assert open_files(config) == [OpenFile(str(file), 0o664, is_written=True)]
    file.chmod(0o644)
    fleet.chmod(0o1777)  # where others add files of their own, which sticky bits do not prevent
    assert open_files(config) == [OpenFile(str(fleet), 0o777, is_written=True)]
    fleet.chmod(0o755)
    others = [of(fleet / f"{name}.json", 0o666) for name in ("a", "b")]
    assert open_files(config) == [OpenFile(str(others[0]), 0o666, is_written=True, more=1)]


def test_who_writes_in_the_folder_of_a_file_can_replace_it(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    config = GatewayConfig(tokenizer_dir=tmp_path, membership=MembershipConfig(file=of(shared / "nodes.toml", 0o644)))
    shared.chmod(0o777)
    assert open_files(config) == [OpenFile(str(shared), 0o777, is_written=True)]
    shared.chmod(0o1777)
    assert open_files(config) == []


def test_keys_of_listed_authorities_and_lists_that_others_write_are_told(tmp_path: Path) -> None:
    sites = TwoSites(tmp_path)
    sites.list.chmod(0o644)
    config = GatewayConfig(
        tokenizer_dir=tmp_path,
        nodes=(NodeAddress(agent="127.0.0.1:7001"),),
        certificate=sites.gateway.certificate,
        key=sites.gateway.key,
        authority=sites.list,
    )
    assert open_files(config) == []
    sites.list.chmod(0o646)
    stolen = of(tmp_path / "remote" / "authority.key", 0o644)
    assert open_files(config) == [OpenFile(str(stolen), 0o644), OpenFile(str(sites.list), 0o646, is_written=True)]


def test_authorities_that_others_can_write_or_replace_are_told(tmp_path: Path) -> None:
    sites, revoked = TwoSites(tmp_path / "certificates"), of(tmp_path / "lists" / "revoked", 0o644)
    config = GatewayConfig(
        tokenizer_dir=tmp_path,
        nodes=(NodeAddress(agent="127.0.0.1:7001"),),
        certificate=sites.gateway.certificate,
        key=sites.gateway.key,
        authority=sites.list,
        revoked=revoked,
    )
    assert open_files(config) == []
    written = [
        of(sites.folder / "remote" / "authority.pem", 0o666), sites.folder / "any", sites.folder, revoked.parent
    ]  # fmt: skip
    for folder in written[1:]:
        folder.chmod(0o777)
    said = {OpenFile(str(path), path.stat().st_mode & 0o777, is_written=True) for path in written}
    assert set(open_files(config)) == said


def test_a_registry_that_others_can_write_is_a_warning() -> None:
    seen = CheckFindings(open_files=[OpenFile("fleet/a.json", 0o666, is_written=True, more=2)])
    (found,) = findings(seen)
    assert found.level is Level.WARNING
    assert "can write it" in found.what
    assert "mode 666), and 2 files beside it" in found.what
    assert found.remedy == "chmod go-w fleet/a.json"
