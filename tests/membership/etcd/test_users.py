"""A real etcd with users: certificates whose CN is the user, and passwords; each may do what its role says."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from membership.errors import SourceFailed
from membership.etcd.entry import EtcdEntry
from membership.etcd.settings import EtcdConfig
from membership.etcd.source import EtcdSource
from membership.member import Member
from tests.membership.etcd.servers import RealEtcd, needed_binary
from transport.control.certificates import Authority

pytestmark = pytest.mark.long

ROOT = b"/prfaas/nodes/"
A = Member(id="a", agent="127.0.0.1:7001")


class Users:
    """An etcd in which `gateway` may read all nodes, and `node-a` may write its own key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder / "certificates")
        server = self.authority.issue("etcd", ["127.0.0.1"])
        arguments = [
            "--cert-file", str(server.certificate), "--key-file", str(server.key), "--client-cert-auth",
            "--trusted-ca-file", str(self.authority.path),
        ]  # fmt: skip
        self.server = RealEtcd(folder, needed_binary(), arguments, tls=True)

    def set_up(self) -> None:
        own = ROOT + b"registered/a"
        grants = {
            "gateway": ("READ", ROOT, ROOT[:-1] + b"0"),
            "node-a": ("READWRITE", own, own + b"\0"),
        }
        ask = self.server.ask
        for name in ("root", *grants):
            ask("auth/user/add", name=name, password=f"{name}-secret")
            ask("auth/role/add", name=name)
            ask("auth/user/grant", user=name, role=name)
        for name, (kind, begin, end) in grants.items():
            bounds = {"key": base64.b64encode(begin).decode(), "range_end": base64.b64encode(end).decode()}
            ask("auth/role/grant", name=name, perm={"permType": kind, **bounds})
        ask("auth/enable")

    def by_certificate(self, name: str) -> EtcdConfig:
        identity = self.authority.issue(name)
        return EtcdConfig(
            endpoints=(self.server.endpoint,), authority=self.authority.path, certificate=identity.certificate,
            key=identity.key,
        )  # fmt: skip

    def by_password(self, name: str, password: str) -> EtcdConfig:
        file = self.folder / f"{name}.password"
        file.write_text(password)
        return EtcdConfig(endpoints=(self.server.inner,), user=name, password_file=file)


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    found = Users(tmp_path)
    try:
        found.server.start()
        found.set_up()
        yield found
    finally:
        found.server.close()


def seen(config: EtcdConfig) -> list[str] | str:
    source = EtcdSource(config)
    try:
        reading = source.look()
    except SourceFailed as failure:
        return failure.reason
    finally:
        source.close()
    return [member.id for member in reading.members] if reading is not None else []


def test_users_by_certificate_and_by_password(users: Users) -> None:
    node = EtcdEntry(users.by_certificate("node-a"), A)
    node.write()
    assert node.beat()
    assert seen(users.by_certificate("gateway")) == ["a"]
    assert seen(users.by_password("gateway", "gateway-secret")) == ["a"]
    assert seen(users.by_password("gateway", "wrong")) == "denied"
    assert seen(users.by_certificate("stranger")) == "denied"
    assert seen(users.by_certificate("node-a")) == "denied"  # it may write its own key, and read no other
    for config in (users.by_certificate("node-a"), users.by_password("node-a", "node-a-secret")):
        with pytest.raises(OSError, match="permission denied"):
            EtcdEntry(config, Member(id="b", agent="127.0.0.1:7002")).write()
    users.server.kill()
    users.server.start()  # which has forgotten all tokens
    assert node.beat()
    node.remove()
    assert seen(users.by_certificate("gateway")) == []


def test_other_authorities_are_not_believed(users: Users, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "elsewhere")
    identity = users.authority.issue("gateway")
    config = EtcdConfig(
        endpoints=(users.server.endpoint,), authority=stranger.path, certificate=identity.certificate, key=identity.key
    )
    source = EtcdSource(config)
    with pytest.raises(SourceFailed, match="its certificate is not of the authority"):
        source.look()
    source.close()
    assert seen(EtcdConfig(endpoints=(users.server.endpoint,), authority=users.authority.path)) == "unreachable"
