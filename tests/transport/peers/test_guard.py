"""Refusals have a reason each, to be counted by."""

from pathlib import Path

import pytest

from tests.peers import OWN
from transport.peers.guard import REVOKED, Guard
from transport.peers.name import PeerCertificate, PeerName, PeerRole
from transport.peers.revocation import RevocationList
from transport.peers.rights import SERVE

GATEWAY = PeerCertificate(PeerName("prfaas", "any", PeerRole.GATEWAY, "g"), 1)
REFUSED = [
    (GATEWAY, "role"),
    (PeerCertificate(PeerName("elsewhere", "west", PeerRole.NODE, "d1"), 2), "trust_domain"),
    (PeerCertificate(None, 3, "no URIs"), "nameless"),
]


@pytest.mark.parametrize(("peer", "reason"), REFUSED)
def test_each_refusal_is_told_with_its_reason(peer: PeerCertificate, reason: str) -> None:
    told = list[str]()
    guard = Guard(OWN)
    guard.told = told.append
    assert guard.why_not(SERVE, peer)
    assert told == []
    assert guard.refusal(SERVE, peer, "10.0.0.1:1")
    assert told == [reason]


def test_the_revoked_are_told_once_at_the_door_and_once_for_what_they_have_open(tmp_path: Path) -> None:
    told, now, path = list[str](), [0.0], tmp_path / "revoked"
    path.write_text("")
    guard = Guard(OWN, RevocationList(path), lambda: now[0])
    guard.told = told.append
    peer = PeerCertificate(OWN, 4)
    assert guard.refusal(SERVE, peer, "10.0.0.1:1") == ""
    with guard.opened(peer, lambda: None):
        path.write_text(f"{OWN}\n")
        now[0] += 5.0
        assert guard.end_revoked() == 1
        assert guard.refusal(SERVE, peer, "10.0.0.1:1")
    assert told == [REVOKED, REVOKED]
