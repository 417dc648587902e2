"""Several workers over HTTPS are one gateway to operators: a session holds at all of them, and so does the audit log."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie
from pathlib import Path

import aiohttp

from gateway.auth.keyring import digest_of
from gateway.auth.sessions import COOKIE
from tests.gateway.http.test_tls import issued
from tests.gateway.scripted import topology
from tests.gateway.test_process import write_config
from tests.gateway.workers.test_supervisor import end_now
from tests.gateway.worlds import on_loop
from transport.control.asking import trusting

CONNECTIONS = 24  # dealt out to two workers: all to one of them once in eight million runs
OPERATOR = """
[[gateway.operators]]
name = "ann"
keys = ["{digest}"]
role = "operator"
"""


@asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[str]:
    """The URL of one with two workers."""
    async with topology(remote=0, local=0, decode=1) as nodes:
        path = write_config(directory, nodes)
        files = "".join(f"{key} = '{file}'\n" for key, file in issued(directory).items())
        text = path.read_text().replace("port = 0", f"port = 0\nworkers = 2\n{files}")
        path.write_text(text + OPERATOR.format(digest=digest_of("sk-ann")))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "-c", str(path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            line = (await process.stdout.readline()).decode().strip()
            assert line.startswith("gateway ready url=https://127.0.0.1:"), line
            yield line.partition("url=")[2]
        finally:
            await end_now(process)
            process.stdout.feed_eof()


@on_loop
async def test_a_session_and_the_audit_log_are_those_of_all_workers(tmp_path: Path) -> None:
    async with gateway(tmp_path) as url:
        trust = trusting(tmp_path / "authority.pem")

        async def ask(method: str, path: str, **headers: str) -> tuple[int, str, str]:
            """On a connection of its own: status, body, and the cookie that was set."""
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as http,
                http.request(method, url + path, headers={"Content-Type": "application/json", **headers}) as answer,
            ):
                morsel = SimpleCookie(answer.headers.get("Set-Cookie", "")).get(COOKIE)
                return answer.status, await answer.text(), morsel.value if morsel else ""

        status, _, token = await ask("POST", "/prfaas/session", Authorization="Bearer sk-ann")
        assert (status, bool(token)) == (200, True)
        cookie = f"{COOKIE}={token}"
        for _ in range(CONNECTIONS):
            status, told, _ = await ask("GET", "/prfaas/session", Cookie=cookie)
            assert (status, json.loads(told)["name"]) == (200, "ann")
            assert (await ask("POST", "/prfaas/config", Cookie=cookie))[0] == 403
        logs = [(await ask("GET", "/prfaas/audit", Cookie=cookie))[1].splitlines() for _ in range(4)]
        actions = [json.loads(line)["action"] for line in logs[0]]
        assert (actions[0], set(actions)) == ("log in", {"log in", "reload"})
        assert all(log[: len(logs[0])] == logs[0] for log in logs)
        assert (await ask("DELETE", "/prfaas/session", Cookie=cookie))[0] == 204
        for _ in range(CONNECTIONS):
            assert (await ask("GET", "/prfaas/session", Cookie=cookie))[0] == 401
