"""Servers that are asked over HTTPS: whose certificate is taken, by chains that TLS takes."""

import ssl
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.transport.peers.two_sites import REMOTE_NODE, TwoSites
from transport.control.certificates import Authority
from transport.peers.name import PeerName, PeerRole
from transport.peers.rights import SERVE, SERVE_PLAN
from transport.wire.asked_servers import MAX_PLACES, RENEW_S, AskedNodes, AskedServers

HERE: Final = "plans.example"
DAY: Final = timedelta(days=1)


class Signer:
    """The key of an authority in other hands: what it may sign is the holder's choice."""

    def __init__(self, folder: Path) -> None:
        self.certificate = x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "authority.key").read_bytes(), None)
        self._key = cast(ec.EllipticCurvePrivateKey, key)

    def sign(self, holder: ec.EllipticCurvePrivateKey, issuer: x509.Name | None = None) -> x509.Certificate:
        """A server's certificate without a name of ours."""
        return signed(holder, _named("x"), issuer or self.certificate.subject, self._key, is_authority=False)

    def chain_below(self, holder: ec.EllipticCurvePrivateKey) -> list[x509.Certificate]:
        """The same by an authority below."""
        key, name = ec.generate_private_key(ec.SECP256R1()), _named("between")
        between = signed(key, name, self.certificate.subject, self._key, is_authority=True)
        return [signed(holder, _named("x"), name, key, is_authority=False), between]


def signed(
    holder: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(issuer, subject, holder.public_key(), x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HERE)]), critical=False)
    )
    return made.sign(key, hashes.SHA256())


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def serving(folder: Path, key: ec.EllipticCurvePrivateKey, chain: Sequence[x509.Certificate]) -> ssl.SSLContext:
    """A server's end with that certificate and those above it."""
    certificate, private = folder / "shown.pem", folder / "shown.key"
    certificate.write_bytes(b"".join(each.public_bytes(serialization.Encoding.PEM) for each in chain))
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    private.write_bytes(text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private)
    return context


def shake(asking: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """A handshake in memory. Raises SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        asking.wrap_bio(back, there, server_hostname=HERE),
        server.wrap_bio(there, back, server_side=True),
    )
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> TwoSites:
    return TwoSites(tmp_path_factory.mktemp("sites"))


@pytest.mark.parametrize("way", ["itself", "below", "in capitals"])
def test_what_a_site_s_authority_has_signed_in_whatever_way_needs_the_right(
    way: str, sites: TwoSites, tmp_path: Path
) -> None:
    signer, key = Signer(sites.folder / "remote"), ec.generate_private_key(ec.SECP256R1())
    capitals = _named(signer.certificate.subject.rfc4514_string().removeprefix("CN=").upper())
    chain = {
        "itself": lambda: [signer.sign(key)],
        "below": lambda: signer.chain_below(key),
        "in capitals": lambda: [signer.sign(key, capitals)],
    }[way]()
    with pytest.raises(ssl.SSLCertVerificationError, match="the certificate has no rights"):
        shake(AskedServers(sites.gateway, SERVE_PLAN).context(), serving(tmp_path, key, chain))


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    """An authority that this host trusts."""
    Authority(tmp_path / "host", "host")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "host" / "authority.pem"))
    return Signer(tmp_path / "host")


@pytest.mark.parametrize("is_below", [False, True])
def test_who_this_host_alone_trusts_is_taken(is_below: bool, trusted: Signer, sites: TwoSites, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    chain = trusted.chain_below(key) if is_below else [trusted.sign(key)]
    shake(AskedServers(sites.gateway, SERVE_PLAN).context(), serving(tmp_path, key, chain))


def test_a_chain_that_cannot_be_seen_is_not_taken(
    trusted: Signer, sites: TwoSites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    monkeypatch.setattr("transport.wire.asked_servers._verified_chain", lambda connection: [])
    with pytest.raises(ssl.SSLCertVerificationError, match="the certificate has no rights"):
        shake(AskedServers(sites.gateway, SERVE_PLAN).context(), serving(tmp_path, key, [trusted.sign(key)]))


def test_connections_are_made_anew_when_a_server_may_be_revoked_and_every_hour(sites: TwoSites, tmp_path: Path) -> None:
    now, revoked = [0.0], tmp_path / "revoked"
    revoked.touch()
    asked = AskedServers(replace(sites.gateway, revoked=revoked), SERVE_PLAN, lambda: now[0])
    contexts = [asked.context()]
    for seconds, text, is_new in (
        (5.0, "", False),
        (5.0, "planner", True),
        (5.0, "planner", False),
        (RENEW_S - 6.0, "planner", False),
        (1.0, "planner", True),
    ):
        if text != revoked.read_text():
            revoked.write_text(text)
        now[0] += seconds
        contexts.append(asked.context())
        assert (contexts[-1] is not contexts[-2]) is is_new


def test_a_planner_is_taken_that_speaks_the_newest_tls(sites: TwoSites, tmp_path: Path) -> None:
    name = PeerName("prfaas", "any", PeerRole.PLANNER, "planner")
    planner = Authority(sites.folder / "any", "any").issue("planner", [HERE], peer=name)
    asking, server = AskedServers(sites.gateway, SERVE_PLAN).context(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(planner.certificate, planner.key)
    shake(asking, server)
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLCertVerificationError, match=r"any/planner/planner speaks TLSv1\.2 alone"):
        shake(asking, server)


def test_a_node_that_is_another_than_the_one_that_is_meant_is_not_taken(sites: TwoSites) -> None:
    nodes, server = AskedNodes(sites.home, SERVE), sites.remote.server_context()
    for meant in (nodes, nodes.at(REMOTE_NODE.place)):
        shake(meant.context(), server)
    assert nodes.at(REMOTE_NODE.place).context() is nodes.at(REMOTE_NODE.place).context()
    with pytest.raises(ssl.SSLCertVerificationError, match="is not the node remote/p1"):
        shake(nodes.at("remote/p1").context(), server)


def test_contexts_of_nodes_are_bounded(sites: TwoSites) -> None:
    nodes = AskedNodes(sites.home, SERVE)
    first = nodes.at("remote/p0")
    kept = [nodes.at(f"remote/p{number}") for number in range(1, MAX_PLACES + 1)]
    assert nodes.at(f"remote/p{MAX_PLACES}") is kept[-1]
    assert nodes.at("remote/p0") is not first
