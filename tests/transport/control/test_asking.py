"""Secrets of commands stay with the server that they are for."""

import io
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest

from planner.errors import ServiceUnusable
from planner.service.client import PlanClient
from prfaas.commands.asking import KEY_VARIABLE, GatewayClient
from prfaas.errors import AskError

Served = tuple[str, list[str]]
"""A server that redirects everything, and what another one, to which it redirects, was shown."""


@pytest.fixture(params=[301, 302, 303, 307, 308])
def redirecting(request: pytest.FixtureRequest) -> Iterator[Served]:
    shown: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Redirects(Elsewhere):
        def do_GET(self) -> None:
            self.send_response(request.param)
            self.send_header("Location", f"http://localhost:{elsewhere.server_port}/elsewhere")
            self.end_headers()

        do_POST = do_GET

    with ExitStack() as stack:
        elsewhere, here = (stack.enter_context(HTTPServer(("127.0.0.1", 0), kind)) for kind in (Elsewhere, Redirects))
        for server in (elsewhere, here):
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            stack.callback(server.shutdown)
        yield f"http://127.0.0.1:{here.server_port}", shown


def test_an_operators_key_follows_no_redirect(redirecting: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    url, shown = redirecting
    monkeypatch.setenv(KEY_VARIABLE, "operator-secret")
    for ask in (
        lambda: GatewayClient(url).get("/prfaas/requests"),
        lambda: GatewayClient(url).post("/prfaas/links", b"{}"),
    ):
        with pytest.raises(AskError, match=r"says 30.: it redirects to http://localhost:\d+/elsewhere"):
            ask()
    assert not shown


def test_a_plan_services_token_follows_no_redirect(redirecting: Served, tmp_path: Path) -> None:
    url, shown = redirecting
    token = tmp_path / "token"
    token.write_text("plan-secret")
    client = PlanClient(url, token)
    for ask in (client.status, lambda: client.change("apply")):
        with pytest.raises(ServiceUnusable, match=r"30. it redirects to http://localhost:\d+/elsewhere"):
            ask()
    assert not shown


NESTED = b'{"unknown":' + b"[" * 200_000


def test_an_answer_that_is_nested_too_deeply_is_no_plan_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.service.client.answer_to", lambda *_: NESTED)
    with pytest.raises(ServiceUnusable, match="not a plan service of this version"):
        PlanClient("http://plan").status()

    def refused(*_: object) -> bytes:
        raise HTTPError("http://plan", 400, "Bad Request", Message(), io.BytesIO(NESTED))

    monkeypatch.setattr("planner.service.client.answer_to", refused)
    with pytest.raises(ServiceUnusable, match="does not answer like a plan service: 400"):
        PlanClient("http://plan").status()
