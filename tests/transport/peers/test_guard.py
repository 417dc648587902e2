"""Refusals have a reason each, to be counted by."""

from pathlib import Path

import pytest

from tests.peers import OWN
from transport.peers.guard import EXPIRED, GRACE_S, LOOK_AT_ENDS_S, REVOKED, Guard
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
    with guard.opened(peer, lambda _: None):
        path.write_text(f"{OWN}\n")
        now[0] += 5.0
        assert guard.end_revoked() == 1
        assert guard.refusal(SERVE, peer, "10.0.0.1:1")
    assert told == [REVOKED, REVOKED]


def test_what_a_peer_has_open_ends_some_time_after_its_certificate(tmp_path: Path) -> None:
    told, ended, now, wall = list[str](), list[str](), [0.0], [0.0]
    guard = Guard(OWN, None, lambda: now[0], lambda: wall[0])
    guard.told = told.append
    looks: list[float] = []
    guard.followers.append(lambda: looks.append(now[0]))
    lives, dies = (PeerCertificate(OWN, serial, ends_at=ends_at) for serial, ends_at in ((1, 1e9), (2, 100.0)))
    with guard.opened(lives, lambda why: ended.append(f"lives: {why}")), guard.opened(dies, ended.append):
        for wall[0], count in ((100.0, 0), (99.0 + GRACE_S, 0), (100.0 + GRACE_S, 1), (200.0 + GRACE_S, 0)):
            now[0] += LOOK_AT_ENDS_S
            assert guard.end_revoked() == count
        assert guard.refusal(SERVE, dies, "10.0.0.1:1").startswith(f"the certificate of {OWN} has expired")
        assert guard.why_not(SERVE, lives) == ""
    assert ended == [EXPIRED]
    assert told == [EXPIRED, EXPIRED]
    assert len(looks) == 4  # they look at ends, too
    assert guard.end_revoked() == 0
    assert len(looks) == 4  # not at every one
