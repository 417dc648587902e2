"""Who is on the list counts no more, within a look at the file."""

from pathlib import Path

import pytest

from transport.peers.guard import Guard
from transport.peers.name import PeerCertificate, PeerName, PeerRole
from transport.peers.revocation import RevocationList, Revoked

OWN = PeerName("prfaas", "west", PeerRole.NODE, "west-d0")
GATEWAY = PeerCertificate(PeerName("prfaas", "any", PeerRole.GATEWAY, "gateway"), 0xABC)


@pytest.mark.parametrize(
    ("line", "has"),
    [
        ("spiffe://prfaas/any/gateway/gateway", True),
        ("gateway  # stolen", True),
        ("0000000000000ABC", True),
        ("0x00:00:00:00:00:00:0a:bc", True),
        ("abc", False),
        ("spiffe://prfaas/any/gateway/other", False),
        ("# gateway", False),
        ("", False),
    ],
)
def test_a_line_is_a_name_or_a_serial(line: str, has: bool) -> None:
    assert Revoked.parse(f"# who is out\n\n{line}\n").has(GATEWAY) is has


def test_a_name_that_is_none_is_refused_with_its_line() -> None:
    with pytest.raises(ValueError, match=r"line 2: .*the role 'king' must be one of"):
        Revoked.parse("\nspiffe://prfaas/any/king/x")


def test_a_change_is_seen_within_a_look_and_a_broken_file_revokes_no_less(tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_text("")
    clock = [0.0]
    guard = Guard(OWN, RevocationList(path), lambda: clock[0])
    ended: list[str] = []
    with guard.opened(GATEWAY, lambda: ended.append("open")):
        assert guard.why_not("rpc.Watch", GATEWAY) == ""
        path.write_text("gateway\n")
        clock[0] += 2.0
        assert guard.why_not("rpc.Watch", GATEWAY) == "spiffe://prfaas/any/gateway/gateway is revoked"
        assert (guard.end_revoked(), guard.end_revoked(), ended) == (1, 0, ["open"])
    path.write_text("spiffe://nonsense")
    clock[0] += 2.0
    assert guard.is_revoked(GATEWAY)
    path.unlink()
    clock[0] += 2.0
    assert guard.is_revoked(GATEWAY)
    path.write_text("# nobody\n")
    clock[0] += 2.0
    assert not guard.is_revoked(GATEWAY)
