"""A name is exactly one shape, whichever way a certificate reaches us."""

import ssl
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests.peers import handshake
from transport.control.certificates import Authority, expires_at
from transport.peers.name import NamelessPeer, PeerName, PeerRole, of_der, of_grpc, of_pem, of_tls
from transport.wire.identity import Identity

EAST = PeerName("prfaas", "east", PeerRole.PREFILL, "east-p0")


def test_a_name_is_read_as_it_is_written() -> None:
    assert str(EAST) == "spiffe://prfaas/east/prefill/east-p0"
    assert PeerName.parse(str(EAST)) == EAST
    assert EAST.place == "east/east-p0"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "east-p0",
        "https://prfaas/east/prefill/p0",
        "spiffe://prfaas/east/prefill",
        "spiffe://prfaas/east/prefill/p0/more",
        "spiffe://prfaas/east/king/p0",
        "spiffe://prfaas/east/Prefill/p0",
        "spiffe://prfaas//prefill/p0",
        "spiffe:///east/prefill/p0",
        "spiffe://prfaas/east/prefill/",
        "spiffe://PRFAAS/east/prefill/p0",
        "spiffe://prfaas:80/east/prefill/p0",
        "spiffe://user@prfaas/east/prefill/p0",
        "spiffe://prfaas/../prefill/p0",
        "spiffe://prfaas/east/prefill/p%30",
        "spiffe://prfaas/east/prefill/p0\n",
        "spiffe://prfaas/east/prefill/p0?x",
        "spiffe://prfaas/east/prefill/é",
        "SPIFFE://prfaas/east/prefill/p0",
        "spiffe://prfaas/east/prefill/" + "x" * 256,
    ],
)
def test_anything_else_is_no_name(text: str) -> None:
    with pytest.raises(NamelessPeer):
        PeerName.parse(text)


def test_one_certificate_has_one_name() -> None:
    assert PeerName.among([str(EAST)]) == EAST
    for uris in ([], [str(EAST), str(EAST)], [str(EAST), "https://example.org"]):
        with pytest.raises(NamelessPeer, match="URIs, where one must be spiffe://TRUST/CLUSTER/ROLE/NAME"):
            PeerName.among(uris)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Authority(tmp_path_factory.mktemp("ca")).issue("east-p0", ["10.0.0.1"], peer=EAST)


def shown(identity: Identity) -> dict[str, Any]:
    """What ssl makes of its certificate, at the other end."""
    found = handshake(identity, identity).getpeercert()
    assert found
    return found


def test_the_same_certificate_says_the_same_however_it_comes(identity: Identity) -> None:
    pem = identity.certificate.read_bytes()
    from_file = of_pem(pem)
    assert from_file.name == EAST
    assert of_tls(shown(identity)) == from_file
    assert of_grpc({"x509_pem_cert": [pem], "peer_spiffe_id": [b"spiffe://lies/a/gateway/b"]}) == from_file
    assert of_grpc({}) is None
    assert identity.own_name() == EAST


def test_a_certificate_without_a_name_says_how_to_get_one(tmp_path: Path) -> None:
    nameless = Authority(tmp_path).issue("old")
    found = of_tls(shown(nameless))
    assert (found.name, found.role) == (None, "none")
    assert found.serial == of_pem(nameless.certificate.read_bytes()).serial
    with pytest.raises(OSError, match=r"it must carry a name spiffe://TRUST/CLUSTER/ROLE/NAME; `prfaas certificates`"):
        nameless.own_name()


def test_a_certificate_says_when_it_ends_however_it_is_read(tmp_path: Path) -> None:
    name = PeerName("prfaas", "any", PeerRole.GATEWAY, "g")
    identity = Authority(tmp_path).issue("g", days=3, peer=name)
    ends_at = expires_at(identity.certificate)
    pem = identity.certificate.read_bytes()
    assert of_pem(pem).ends_at == ends_at
    assert of_der(ssl.PEM_cert_to_DER_cert(pem.decode())).ends_at == ends_at
    said = datetime.fromtimestamp(ends_at, UTC).strftime("%b %d %H:%M:%S %Y GMT")  # as `ssl` says it
    assert of_tls({"notAfter": said}).ends_at == ends_at
    assert of_tls({}).ends_at == inf
    assert of_pem(pem) == replace(of_pem(pem), ends_at=0.0)  # whose it is does not depend on it
