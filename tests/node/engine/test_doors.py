"""Which door an engine has, and whom the door lets in."""

from pathlib import Path

from node.engine.doors import OpenDoor, door_of
from node.process.tls_front import TlsFront
from tests.gateway.worlds import on_both_loops, until
from tests.node.process.callers import HOST, calling, engine_running, fronted, is_refused
from tests.peers import Peers
from transport.control.credentials import takes_old_tls
from transport.peers.name import PeerRole
from transport.peers.rights import ASK_ENGINE


def test_without_certificates_the_engine_is_its_own_door() -> None:
    door = OpenDoor()
    assert door.url == ""
    door.open("http://127.0.0.1:1234")
    door.shut()
    assert door.url == "http://127.0.0.1:1234"


def test_engines_are_asked_by_gateways_only_and_not_by_revoked_ones(peers: Peers, tmp_path: Path) -> None:
    @on_both_loops
    async def scenario() -> None:
        (tmp_path / "revoked").write_text("")
        identity, guard = peers.guarded(tmp_path / "revoked")
        front = door_of(identity, guard)
        assert isinstance(front, TlsFront)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            for role, thief in peers.by_role.items():
                if role is not PeerRole.GATEWAY:
                    assert await is_refused(port, thief)
                    assert guard.refused[ASK_ENGINE, role] == 1
            for number, thief in enumerate((peers.nameless, peers.twofold, peers.abroad), start=1):
                assert await is_refused(port, thief)
                assert front.ended["no_right"] == len(PeerRole) - 1 + number
            for number, thief in enumerate((peers.expired, peers.stranger), start=1):
                assert await is_refused(port, thief)
                assert front.ended["handshake"] == number
            assert not await takes_old_tls(f"{HOST}:{port}", peers.by_role[PeerRole.GATEWAY], 10.0)
            assert engine.open == engine.read == 0
            async with calling(port, peers.by_role[PeerRole.GATEWAY]) as (reader, writer):
                writer.write(b"x")
                await reader.readexactly(1)
                (tmp_path / "revoked").write_text("thief-gateway\n")

                def is_over() -> bool:
                    guard.end_revoked()
                    return len(front) == 0

                await until(is_over)

    scenario()
