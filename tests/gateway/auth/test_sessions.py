"""A browser logs in with a key, has a cookie that no script reads and no other site sends, and logs out."""

from http.cookies import Morsel, SimpleCookie
from pathlib import Path

import pytest

from gateway.auth.keyring import Keyring, digest_of
from gateway.auth.operator import Operator
from gateway.auth.sessions import (
    COOKIE,
    MOST_OF_ONE,
    MOST_SESSIONS,
    LocalSessions,
    OperatorSession,
    OperatorSessions,
    SessionStore,
    SharedSessions,
    token_in,
)
from gateway.config.operators import OperatorConfig, OperatorRole
from gateway.config.tenants import TenantConfig
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline

ANN = OperatorConfig(name="ann", keys=(digest_of("sk-ann"),), role=OperatorRole.OPERATOR)
TENANTS = {"acme": TenantConfig(keys=(digest_of("sk-acme"),))}
JSON = {"Content-Type": "application/json"}


def cookie(token: str) -> dict[str, str]:
    return {"Cookie": f"theme=dark; {COOKIE}={token}"}


@pytest.fixture(params=["local", "shared"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SessionStore:
    return LocalSessions() if request.param == "local" else SharedSessions(tmp_path / "sessions")


def test_a_session_is_its_keys_until_it_ends(store: SessionStore) -> None:
    now = [1000.0]
    sessions = OperatorSessions(store, length_s=60.0)
    keyring = Keyring({}, [ANN], unix_s=lambda: now[0], sessions=sessions)
    token = sessions.begin(digest_of("sk-ann"), now[0])
    assert keyring.check_operator(cookie(token)).name == "ann"
    for other in (cookie(token + "x"), cookie(""), {"Cookie": "a" * 9000}, {"Cookie": f"{COOKIE}=\udcff"}):
        assert not keyring.is_operator(other)
    now[0] += 60.0
    assert not keyring.is_operator(cookie(token))
    again = sessions.begin(digest_of("sk-ann"), now[0])
    sessions.end(cookie(again))
    assert not keyring.is_operator(cookie(again))
    third = sessions.begin(digest_of("sk-ann"), now[0])
    keyring.configure({}, [])  # without the key there is no session of it
    assert not keyring.is_operator(cookie(third))


def test_so_many_sessions_are_kept_at_most(store: SessionStore) -> None:
    for number in range(MOST_SESSIONS + 10):
        store.put(f"{number:04}", OperatorSession(f"digest of {number // 10}", 1.0))
    kept = [number for number in range(MOST_SESSIONS + 10) if store.get(f"{number:04}") is not None]
    assert len(kept) == MOST_SESSIONS
    assert kept[-1] == MOST_SESSIONS + 9


@pytest.mark.parametrize("operator", [None, Operator("vic", OperatorRole.VIEWER, "https://login.example.com")])
def test_one_operators_sessions_end_no_others(store: SessionStore, operator: Operator | None) -> None:
    store.put("admins", OperatorSession("another", 1.0))
    names = [f"{number:04}" for number in range(MOST_SESSIONS + 10)]
    for name in names:
        store.put(name, OperatorSession("digest" if operator is None else name, 1.0, operator))
    assert store.get("admins") is not None
    assert sum(store.get(name) is not None for name in names) == MOST_OF_ONE
    assert store.get(names[-1]) is not None


def test_workers_share_sessions_which_only_their_user_reads(tmp_path: Path) -> None:
    one, other = SharedSessions(tmp_path / "sessions"), SharedSessions(tmp_path / "sessions")
    token = OperatorSessions(one, 60.0).begin("digest", 0.0)
    assert OperatorSessions(other, 60.0).of(cookie(token), 1.0) == OperatorSession("digest", 60.0)
    assert (tmp_path / "sessions").stat().st_mode & 0o777 == 0o700
    assert not any(token in path.name or token in path.read_text() for path in (tmp_path / "sessions").iterdir())


def test_a_cookie_is_found_among_others() -> None:
    assert token_in({"Cookie": f"a=b; {COOKIE}=xyz; c=d"}) == "xyz"
    assert token_in({"Cookie": "a=b"}) == ""
    assert token_in({}) == ""


async def log_in(w: Pipelined, key: str, status: int = 200, **headers: str) -> "Morsel[str] | None":
    shown = JSON | {"Authorization": f"Bearer {key}"} | headers
    async with w.http.post("/prfaas/session", json={}, headers=shown) as answer:
        assert answer.status == status, await answer.text()
        told = SimpleCookie(answer.headers.get("Set-Cookie", ""))
    w.http.cookie_jar.clear()
    return told.get(COOKIE)


@on_memory_loop
async def test_an_operator_logs_in_looks_and_logs_out() -> None:
    async with pipeline(tenants=TENANTS, operators=(ANN,)) as w:
        for key in ("sk-nobody", "sk-acme"):
            await log_in(w, key, status=401)
        morsel = await log_in(w, "sk-ann")
        assert morsel is not None
        assert (morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, "Strict", "/")
        assert morsel["secure"] == ""
        headers = {"Cookie": f"{COOKIE}={morsel.value}"}
        async with w.http.get("/prfaas/session", headers=headers) as answer:
            assert await answer.json() == {"name": "ann", "role": "operator"}
        for path, status in (("/console", 200), ("/metrics", 200), ("/v1/models", 401)):
            async with w.http.get(path, headers=headers) as answer:
                assert answer.status == status
        change = {"source": "east", "destination": "west", "drained": True}
        for origin, status in ((w.url, 200), ("https://evil.example", 403)):
            async with w.http.post("/prfaas/links", json=change, headers={**headers, "Origin": origin}) as answer:
                assert answer.status == status
        async with w.http.delete("/prfaas/session", headers=headers | JSON) as answer:
            assert answer.status == 204
            assert SimpleCookie(answer.headers["Set-Cookie"])[COOKIE]["max-age"] == "0"
        w.http.cookie_jar.clear()
        async with w.http.get("/metrics", headers=headers) as answer:
            assert answer.status == 401


@on_memory_loop
async def test_behind_tls_the_cookie_never_leaves_in_clear() -> None:
    async with pipeline(operators=(ANN,)) as w:
        at = {"Host": "gateway.example", "Origin": "https://gateway.example"}
        morsel = await log_in(w, "sk-ann", **at)
        assert morsel is not None
        assert morsel["secure"] is True


@on_memory_loop
async def test_a_stranger_finds_a_page_to_log_in_at_and_nothing_of_the_console() -> None:
    async with pipeline(operators=(ANN,)) as w:
        async with w.http.get("/console") as answer:
            page = await answer.text()
            assert (answer.status, answer.content_type) == (401, "text/html")
            assert "Basic" not in answer.headers.get("WWW-Authenticate", "")
        assert "console/login.js" in page
        assert "app.js" not in page
        for name, status in (("login.js", 200), ("login.css", 200), ("icon.svg", 200), ("app.js", 401)):
            async with w.http.get(f"/console/{name}") as answer:
                assert answer.status == status
