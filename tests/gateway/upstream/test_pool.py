"""Kept connections, to servers on loopback that behave as badly as the test wants."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import LegFailed
from gateway.upstream.pool import EnginePool, UpstreamEngine
from tests.gateway.worlds import PATIENCE_S, on_both_loops, on_loop, until
from tests.peers import HOST, Peers
from transport.control.certificates import Authority
from transport.peers.guard import REVOKED, Guard
from transport.peers.name import PeerRole
from transport.peers.rights import SERVE
from transport.wire.identity import Identity

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers what it is told to; `heads` are the requests it saw."""

    def __init__(self, answer: bytes = OK) -> None:
        self.answer = answer
        self.url = ""
        self.heads: list[bytes] = []
        self.num_connections = 0
        self.num_closed = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await _head(reader):
                self.heads.append(head)
                await self.go_on.wait()
                writer.write(self.answer)
        except ConnectionError:
            pass
        finally:
            self.num_closed += 1
            writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return head


@asynccontextmanager
async def serving(answer: bytes = OK, identity: Identity | None = None) -> AsyncIterator[Server]:
    server = Server(answer)
    secure = identity.server_context() if identity is not None else None
    listening = await asyncio.start_server(server, "127.0.0.1", 0, ssl=secure)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"http{'s' if secure else ''}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        server.go_on.set()
        listening.close()
        await until(lambda: server.num_closed == server.num_connections)


def pool_of(limit: int = 8, keep_alive_s: float = PATIENCE_S) -> EnginePool:
    return EnginePool(limit, PATIENCE_S, keep_alive_s)


async def post(
    pool: EnginePool, url: str, body: bytes = b"{}", within_s: float = PATIENCE_S, *, name: str = "", place: str = ""
) -> bytes:
    answer = await pool.post(url, "/v1", "X-A: b\r\n", body, within_s, name=name, place=place)
    try:
        return await answer.whole()
    finally:
        answer.close()


@on_loop
async def test_a_connection_is_used_again() -> None:
    async with serving() as server:
        pool = pool_of()
        assert [await post(pool, server.url) for _ in range(3)] == [b"ok"] * 3
        assert (server.num_connections, len(pool)) == (1, 1)
        first = server.heads[0].split(b"\r\n")
        assert first[0] == b"POST /v1 HTTP/1.1"
        assert {b"Host: " + server.url[7:].encode(), b"Content-Length: 2", b"X-A: b"} <= set(first)
        pool.close()
        assert len(pool) == 0


@on_loop
async def test_what_is_idle_for_long_is_closed() -> None:
    async with serving() as server:
        pool = pool_of(keep_alive_s=0.01)
        await post(pool, server.url)
        await until(lambda: len(pool) == 0)
        await until(lambda: server.num_closed == 1)
        await post(pool, server.url)
        assert server.num_connections == 2
        pool.close()


@on_loop
async def test_what_the_engine_has_closed_is_not_used() -> None:
    async with serving(OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")) as server:
        pool = pool_of()
        assert await post(pool, server.url) == await post(pool, server.url) == b"ok"
        assert (server.num_connections, len(pool)) == (2, 0)
        pool.close()


@on_loop
async def test_a_long_body_arrives_whole() -> None:
    async with serving() as server:
        pool = pool_of()
        assert await post(pool, server.url, bytes(8 << 20)) == b"ok"
        assert await post(pool, server.url) == b"ok"
        assert b"Content-Length: 8388608" in server.heads[0]
        pool.close()


@on_loop
async def test_no_more_than_the_limit_are_open() -> None:
    async with serving() as server:
        pool = pool_of(limit=2)
        server.go_on.clear()
        posts = [asyncio.create_task(post(pool, server.url)) for _ in range(5)]
        await until(lambda: len(server.heads) == 2)
        posts[2].cancel()  # one of those that wait
        server.go_on.set()
        assert await asyncio.gather(*posts[:2], *posts[3:]) == [b"ok"] * 4
        assert server.num_connections == 2
        pool.close()


@on_loop
async def test_an_idle_connection_makes_way_for_another_engine() -> None:
    async with serving() as one, serving() as other:
        pool = pool_of(limit=1)
        for _ in range(2):
            assert await post(pool, one.url) == await post(pool, other.url) == b"ok"
        assert (one.num_connections, other.num_connections) == (2, 2)
        pool.close()


@on_loop
async def test_who_is_cancelled_leaves_no_connection() -> None:
    async with serving() as server:
        pool = pool_of()
        server.go_on.clear()
        asking = asyncio.create_task(post(pool, server.url))
        await until(lambda: server.heads)
        asking.cancel()
        await asyncio.wait([asking])
        assert len(pool) == 0
        pool.close()


@on_loop
async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pool = pool_of()
    with pytest.raises(LegFailed) as failed:
        await post(pool, f"http://127.0.0.1:{port}")
    assert (failed.value.reason, len(pool)) == ("unreachable", 0)
    pool.close()


@on_loop
async def test_a_deadline_bounds_connecting_and_answering() -> None:
    async with serving() as server:
        pool = pool_of()
        server.go_on.clear()
        with pytest.raises(LegFailed) as failed:
            await post(pool, server.url, within_s=0.05)
        assert (failed.value.reason, len(pool)) == ("timeout", 0)
        pool.close()


@pytest.mark.parametrize(
    "url", ["", "engine:80", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a\r\nX: y", "http://ä"]
)
def test_what_is_no_url_of_http_is_unreachable(url: str) -> None:
    with pytest.raises(LegFailed) as failed:
        UpstreamEngine(url)
    assert failed.value.reason == "unreachable"


def test_a_head_names_the_authority_and_keeps_the_path() -> None:
    engine = UpstreamEngine("http://user:secret@[::1]:8000/base/")
    assert (engine.host, engine.port) == ("::1", 8000)
    head = engine.head("/v1", "traceparent: \udcff\r\n", 7)
    assert head.startswith(b"POST /base/v1 HTTP/1.1\r\nHost: [::1]:8000\r\n")
    assert head.endswith(b"Content-Length: 7\r\ntraceparent: \xff\r\n\r\n")


@on_loop
async def test_whoever_has_waited_for_room_uses_connections_that_are_known_to_all() -> None:
    async with serving() as server, serving() as other:
        server.go_on.clear()
        other.go_on.clear()
        pool = pool_of(limit=2, keep_alive_s=0.05)
        held = [asyncio.create_task(post(pool, other.url)) for _ in range(2)]
        await until(lambda: other.num_connections == 2)
        waiting = [asyncio.create_task(post(pool, server.url)) for _ in range(2)]
        await asyncio.sleep(0)
        other.go_on.set()
        await until(lambda: server.num_connections == 2)
        server.go_on.set()
        assert await asyncio.gather(*held, *waiting) == [b"ok"] * 4
        await until(lambda: len(pool) == 0)  # once they have been idle for long


@on_loop
async def test_a_pool_that_grows_lets_in_all_who_wait_for_room() -> None:
    async with serving() as server:
        server.go_on.clear()
        pool = pool_of(limit=1)
        asking = [asyncio.create_task(post(pool, server.url)) for _ in range(3)]
        await until(lambda: server.num_connections == 1)
        pool.resize(3)
        await until(lambda: server.num_connections == 3)
        server.go_on.set()
        assert await asyncio.gather(*asking) == [b"ok"] * 3
        pool.close()


def test_engines_behind_mutual_tls_are_asked_by_name_and_a_new_certificate_is_taken_up(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs", "stranger")
    node, gateway = authority.issue("node"), authority.issue("gateway")

    @on_loop
    async def scenario() -> None:
        pool = EnginePool(8, PATIENCE_S, 0.0, gateway)
        async with serving(identity=node) as server:
            assert await post(pool, server.url, name="node") == b"ok"
            with pytest.raises(LegFailed, match="certificate verify failed"):
                await post(pool, server.url, name="another")
            plain = EnginePool(8, PATIENCE_S, 0.0)
            with pytest.raises(LegFailed, match="certificate verify failed"):
                await post(plain, server.url, name="node")
            made = stranger.issue("gateway")
            for theirs, ours in ((made.certificate, gateway.certificate), (made.key, gateway.key)):
                theirs.replace(ours)
            with pytest.raises(LegFailed):
                await post(pool, server.url, name="node")
            authority.issue("gateway")
            assert await post(pool, server.url, name="node") == b"ok"
            pool.close()
            plain.close()

    scenario()


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    return Peers(tmp_path_factory.mktemp("peers"))


def guarded(peers: Peers, revoked: Path) -> tuple[EnginePool, Guard]:
    """On the running loop; `revoked` is there."""
    gateway = replace(peers.by_role[PeerRole.GATEWAY], revoked=revoked)
    guard = gateway.guard()
    return EnginePool(8, PATIENCE_S, PATIENCE_S, gateway, guard), guard


@pytest.mark.parametrize("role", list(PeerRole))
def test_only_nodes_that_count_are_told_a_prompt(role: PeerRole, peers: Peers, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"

    @on_both_loops
    async def scenario() -> None:
        is_node = role in (PeerRole.NODE, PeerRole.PREFILL)
        for listed in ("", f"thief-{role}\n"):
            says = "is revoked" if listed else "may not node.serve"
            revoked.write_text(listed)
            pool, guard = guarded(peers, revoked)
            async with serving(identity=peers.by_role[role]) as server:
                if is_node and not listed:
                    assert await post(pool, server.url, name=HOST) == b"ok"
                else:
                    with pytest.raises(LegFailed, match=says) as failed:
                        await post(pool, server.url, name=HOST)
                    assert (failed.value.reason, server.heads) == ("unreachable", [])
                    assert guard.refused[SERVE, role] == 1
                    assert len(pool) == 0
                pool.close()

    scenario()


def test_another_node_s_engine_is_told_no_prompt(peers: Peers, tmp_path: Path) -> None:
    @on_loop
    async def scenario() -> None:
        revoked = tmp_path / "revoked"
        revoked.touch()
        pool, guard = guarded(peers, revoked)
        async with serving(identity=peers.by_role[PeerRole.NODE]) as server:
            assert await post(pool, server.url, name=HOST, place="east/thief-node") == b"ok"
            with pytest.raises(LegFailed, match="thief-node is not the node west/d0"):
                await post(pool, server.url, name=HOST, place="west/d0")  # not over the open one either
            assert (len(server.heads), guard.refused[SERVE, "node"]) == (1, 1)
            pool.close()

    scenario()


def test_connections_to_an_engine_that_is_revoked_end_used_and_idle_ones(peers: Peers, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"

    @on_loop
    async def scenario() -> None:
        revoked.write_text("")
        pool, guard = guarded(peers, revoked)
        async with serving(identity=peers.by_role[PeerRole.NODE]) as server:
            server.go_on.clear()
            asking = [asyncio.create_task(post(pool, server.url, name=HOST)) for _ in range(2)]
            await until(lambda: len(server.heads) == 2)
            server.go_on.set()
            await asyncio.gather(*asking)
            server.go_on.clear()
            busy = asyncio.create_task(post(pool, server.url, name=HOST))
            await until(lambda: len(server.heads) == 3)
            assert len(pool) == 2
            revoked.write_text("thief-node\n")
            await until(lambda: guard.end_revoked() == 2)
            with pytest.raises(LegFailed) as failed:
                await busy
            assert (failed.value.reason, len(pool)) == ("connection_lost", 0)
            assert guard.refused[REVOKED, "node"] == 2
            pool.close()

    scenario()


def test_with_certificates_no_engine_of_another_machine_is_asked_in_clear(tmp_path: Path) -> None:
    gateway = Authority(tmp_path).issue("gateway")

    @on_loop
    async def scenario() -> None:
        pool = EnginePool(8, PATIENCE_S, 0.0, gateway)
        for host in ("10.0.0.2", "engine.example", "[2001:db8::1]"):
            with pytest.raises(LegFailed, match="in clear, and this gateway has certificates"):
                await post(pool, f"http://{host}:7201")
        async with serving() as server:  # of this machine
            assert await post(pool, server.url) == b"ok"

    scenario()


class HastyPool(EnginePool):
    """Uses no secure connection for a second request."""

    renew_s = 0.0


def test_a_secure_connection_that_is_old_is_used_no_more(peers: Peers) -> None:
    @on_loop
    async def scenario() -> None:
        pool = HastyPool(8, PATIENCE_S, PATIENCE_S, peers.by_role[PeerRole.GATEWAY])
        async with serving(identity=peers.by_role[PeerRole.NODE]) as server:
            assert [await post(pool, server.url, name=HOST) for _ in range(2)] == [b"ok"] * 2
            assert (server.num_connections, len(pool)) == (2, 0)
        async with serving() as server:  # nothing was shown there
            assert [await post(pool, server.url) for _ in range(2)] == [b"ok"] * 2
            assert server.num_connections == 1
            pool.close()

    scenario()
