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
        ("serial=0ABC", True),
        ("serial=ABC", True),
        ("0xabc", True),
        ("0A:BC", True),
        ("2748", True),
        ("2749", False),
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


def test_digits_alone_are_every_number_and_the_name_that_they_may_be() -> None:
    revoked = Revoked.parse("1000")
    assert revoked == Revoked(frozenset({"1000"}), frozenset({1000, 0x1000}))


@pytest.mark.parametrize(
    "line",
    ["east/east-p0", "gate way", "SPIFFE://prfaas/any/gateway/gateway", "serial=", "serial=xyz", "serial: 3FA0", "..",
     "3f::a0", "\ufeffgateway", "gateway,other", "g" * 256],
)  # fmt: skip
def test_what_is_neither_a_name_nor_a_serial_is_refused_with_file_and_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_text(f"gateway\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"revoked {path}: line 2: .* nor a serial number"):
        RevocationList(path).load()


def test_a_change_is_seen_within_a_look_and_a_broken_file_revokes_no_less(tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_text("")
    clock = [0.0]
    guard = Guard(OWN, RevocationList(path), lambda: clock[0])
    ended: list[str] = []
    with guard.opened(GATEWAY, lambda _: ended.append("open")):
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


def test_an_error_in_one_follower_keeps_no_other_from_being_told_and_is_not_the_last_look(tmp_path: Path) -> None:
    path, now, told = tmp_path / "revoked", [0.0], []
    path.touch()
    guard = Guard(OWN, RevocationList(path), lambda: now[0])
    failures = [RuntimeError("a follower broke")]

    def follow() -> None:
        told.append("follower")
        if failures:
            raise failures.pop()

    guard.followers.append(follow)
    with guard.opened(GATEWAY, lambda _: told.append("end")):
        path.write_text("gateway\n")
        now[0] = 10.0
        with pytest.raises(RuntimeError, match="broke"):
            guard.end_revoked()
        assert sorted(told) == ["end", "follower"]
        told.clear()
        assert (guard.end_revoked(), told) == (0, ["follower"])
        assert (guard.end_revoked(), told) == (0, ["follower"])
