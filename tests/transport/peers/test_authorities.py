"""Each authority signs for its own site: what another one has signed in that site's name gets nowhere."""

import logging
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from tests.peers import Peers, handshake
from tests.transport.peers.test_transfers import listening, session_of
from tests.transport.peers.two_sites import GATEWAY, HOME_NODE, REMOTE_NODE, TwoSites
from transport.errors import ConnectionRefused
from transport.peers.authorities import AuthorityFile, AuthorityScope, SiteAuthority
from transport.peers.guard import UNLISTED, Guard
from transport.peers.name import PeerCertificate, PeerName, PeerRole, of_pem, of_tls, said_by
from transport.peers.revocation import RevocationList
from transport.peers.rights import GREET, SERVE
from transport.wire.identity import Identity


def shown(client: Identity, server: Identity) -> PeerCertificate:
    """What the server sees of the client, after a handshake in memory."""
    return of_tls(said_by(handshake(client, server)))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> TwoSites:
    return TwoSites(tmp_path_factory.mktemp("sites"))


def test_each_site_s_own_peers_are_taken(sites: TwoSites) -> None:
    guard = sites.home.guard()
    for identity, operation in ((sites.remote, GREET), (sites.gateway, "rpc.Reserve"), (sites.home, SERVE)):
        assert guard.refusal(operation, shown(identity, sites.home), "there") == ""


@pytest.mark.parametrize("name", [HOME_NODE, GATEWAY, PeerName("prfaas", "remote", PeerRole.OPERATOR, "o")])
def test_another_site_s_authority_mints_nobody_of_ours(
    name: PeerName, sites: TwoSites, caplog: pytest.LogCaptureFixture
) -> None:
    guard, told = sites.home.guard(), list[str]()
    guard.told = told.append
    forged = shown(sites.issue("remote", name), sites.home)  # TLS takes it, as it takes all that remote has signed
    assert forged.name == name
    with caplog.at_level(logging.WARNING):
        assert guard.refusal("rpc.Describe", forged, "10.1.0.1:7")
    assert told == [UNLISTED]
    assert (
        f"refused rpc.Describe to {name} at 10.1.0.1:7: {name} is signed by remote/authority.pem, "
        "which signs for remote/prefill alone" in caplog.text
    )


def test_an_authority_that_calls_itself_like_another_one_is_seen_through(tmp_path: Path) -> None:
    sites = TwoSites(tmp_path)
    made = sites.behind_an_authority_of_the_same_name(
        HOME_NODE
    )  # TLS may find a way to one of the list by another name
    forged = of_pem(made.certificate.read_bytes())
    assert forged.name == HOME_NODE
    why = sites.gateway.guard().why_not(SERVE, forged)
    assert why == f"no authority of the list has signed {HOME_NODE} itself"


def test_a_signature_of_an_unknown_kind_counts_for_none() -> None:
    """OpenSSL verifies more kinds than `cryptography`: RSA-PSS with SHA-512/256 is one."""
    key, name = rsa.generate_private_key(65537, 2048), x509.Name([])
    now, day = datetime.now(UTC), timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    pss = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
    signed = made.sign(key, hashes.SHA256(), rsa_padding=pss)
    sha256, sha512_256 = (bytes.fromhex(f"60864801650304020{kind}") for kind in (1, 6))
    der = signed.public_bytes(Encoding.DER).replace(sha256, sha512_256)
    authority = SiteAuthority("remote/authority.pem", (signed,), ())
    assert authority.has_signed(signed.public_bytes(Encoding.DER))
    assert not authority.has_signed(der)


class Puzzled(Guard):
    """Fails at one peer."""

    def is_revoked(self, peer: PeerCertificate) -> bool:
        if peer.name == REMOTE_NODE:
            raise RuntimeError("what is this?")
        return super().is_revoked(peer)


def test_a_peer_that_cannot_be_judged_ends_and_keeps_no_others_open(tmp_path: Path) -> None:
    now, ended, revoked = [0.0], list[str](), tmp_path / "revoked"
    revoked.touch()
    guard = Puzzled(HOME_NODE, RevocationList(revoked), now=lambda: now[0])
    stays = PeerName("prfaas", "home", PeerRole.NODE, "d1")
    for serial, name in enumerate((REMOTE_NODE, GATEWAY, stays)):
        guard.enter(PeerCertificate(name, serial), lambda reason, name=name: ended.append(f"{name.name} {reason}"))  # type: ignore[misc]
    revoked.write_text("g\n")
    now[0] += 5.0
    assert guard.end_revoked() == 2
    assert sorted(ended) == ["g revoked", "p0 unlisted"]


def test_a_listener_of_transfers_gives_keys_to_its_own_sites_alone(sites: TwoSites) -> None:
    with listening(sites.home, sites.home.guard()) as server:
        assert session_of(server, sites.remote).peer is not None
        with pytest.raises(ConnectionRefused, match=r"signed by remote/authority\.pem, which signs for remote/prefill"):
            session_of(server, sites.issue("remote", PeerName("prfaas", "home", PeerRole.NODE, "d7")))


def test_an_authority_that_leaves_the_list_takes_what_is_open_with_it(tmp_path: Path) -> None:
    sites, now, ended = TwoSites(tmp_path), [0.0], list[str]()
    guard = Guard(HOME_NODE, now=lambda: now[0], authorities=AuthorityFile(sites.list))
    remote, home = (of_pem(each.certificate.read_bytes()) for each in (sites.remote, sites.home))
    with guard.opened(remote, ended.append), guard.opened(home, ended.append):
        now[0] += 5.0
        assert guard.end_revoked() == 0
        sites.list.write_text("home/authority.pem home/node\n")
        (tmp_path / "remote" / "authority.pem").unlink()
        now[0] += 5.0
        assert guard.end_revoked() == 1
    assert ended == [UNLISTED]
    assert (guard.shut_out(remote), guard.shut_out(home)) == (UNLISTED, "")
    with pytest.raises(ssl.SSLError):
        shown(sites.remote, replace(sites.home))  # nor does a handshake take it


def test_while_a_list_is_wrong_the_one_before_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sites = TwoSites(tmp_path)
    file = AuthorityFile(sites.list)
    before = file.now(0.0)
    sites.list.write_text("home/authority.pem home/king")
    assert file.now(5.0) == before
    assert "'home/king': must be CLUSTER/ROLE" in caplog.text
    with pytest.raises(OSError, match=r"authorities: line 1: 'home/king': must be"):
        replace(sites.home).check()


@pytest.mark.parametrize("changed", ["authorities", "remote/authority.pem"])
def test_a_file_that_changes_while_it_is_read_is_read_again(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, read = TwoSites(tmp_path), Path.read_bytes
    home = (tmp_path / "home" / "authority.pem").read_bytes()
    text = home if changed.endswith(".pem") else b"home/authority.pem home/node\n"

    def overtaken(path: Path) -> bytes:
        found = read(path)
        if path == tmp_path / changed:
            path.write_bytes(text)
        return found

    file = AuthorityFile(sites.list)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", overtaken)
        before = file.now(0.0)
    assert file.now(5.0) != before
    assert file.now(5.0) == AuthorityFile(sites.list).load()


@pytest.mark.parametrize("added", ["# as -----BEGIN CERTIFICATE----- says\n", "remote"])
def test_a_list_with_a_certificate_in_it_does_not_open_for_all(added: str, tmp_path: Path) -> None:
    sites = TwoSites(tmp_path)
    file = AuthorityFile(sites.list)
    before, text = file.now(0.0), sites.list.read_text()
    pem = (tmp_path / "remote" / "authority.pem").read_text()
    sites.list.write_text(text + pem if added == "remote" else added + text)
    assert file.now(5.0) == before
    assert before.sites is not None


def test_a_pem_file_may_begin_with_comments(tmp_path: Path) -> None:
    sites, file = TwoSites(tmp_path), tmp_path / "one.pem"
    file.write_bytes(b"# the home site\n\n" + (tmp_path / "home" / "authority.pem").read_bytes())
    assert AuthorityFile(file).load().sites is None
    assert shown(sites.home, replace(sites.home, authority=file)).name == HOME_NODE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("home/authority.pem", "line 1: home/authority.pem signs for none"),
        ("# nothing\n", "it names no authority"),
        ("home/authority.pem home", "'home': must be CLUSTER/ROLE"),
        ("authorities home/node", "line 1: "),
        ("home/authority.pem home/node\n-----BEGIN CERTIFICATE-----\n", "line 2: a certificate has no place in a list"),
        ("nowhere.pem home/node", "No such file"),
    ],
)
def test_a_list_that_says_nothing_sound_is_refused(text: str, message: str, tmp_path: Path) -> None:
    sites = TwoSites(tmp_path)
    sites.list.write_text(text)
    with pytest.raises((OSError, ValueError), match=message):
        AuthorityFile(sites.list).load()


def test_scopes_have_names() -> None:
    every, gateways = AuthorityScope.parse("remote/*"), AuthorityScope.parse("*/gateway")
    assert (every.has(REMOTE_NODE), every.has(HOME_NODE), every.has(GATEWAY)) == (True, False, False)
    assert (gateways.has(REMOTE_NODE), gateways.has(GATEWAY)) == (False, True)


def test_who_is_not_its_own_authority_s_to_sign_does_not_start(sites: TwoSites) -> None:
    with pytest.raises(OSError, match=r"d0\.pem: .* is signed by remote/authority\.pem, which signs for"):
        sites.issue("remote", HOME_NODE).guard()


def test_in_a_file_without_a_list_every_authority_signs_for_all(peers: Peers, sites: TwoSites, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(peers.server.authority.read_bytes() + (sites.folder / "remote" / "authority.pem").read_bytes())
    forged = sites.issue("remote", HOME_NODE)
    server = replace(peers.server, authority=both)
    assert server.guard().why_not(SERVE, shown(replace(forged, authority=both), server)) == ""
