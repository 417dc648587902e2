"""Commands that ask a gateway, at addresses without one."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from prfaas.cli import main
from tests.gateway.worlds import on_loop, world


class Page(BaseHTTPRequestHandler):
    """What a server answers that knows a page for every path."""

    says = b"<html>Welcome!</html>"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.says)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(page: type[Page]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    with serving(Page) as url:
        yield url


COMMANDS = (["top", "--once"], ["flows", "--once"], ["reload", "--dry-run"])


@pytest.mark.parametrize(
    "url",
    ["", "nothing", "http://[::1", "http://127.0.0.1:no", "http://a b", "http://127.0.0.1:99999", "127.0.0.1:8000"],
)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_no_url_is_named(command: list[str], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "-u", url]) == 1
    assert f"--url {url}" in capsys.readouterr().err


def test_a_server_without_tls_is_told_from_one_that_is_down(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = page.replace("http://", "https://")
    assert main(["top", "--once", "-u", url]) == 1
    told = f"no gateway answers at {url}: it does not speak TLS; is its URL http:// instead?\n"
    assert capsys.readouterr().err == f"prfaas top: {told}"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_who_answers_with_pages_is_no_gateway(
    command: list[str], page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "-u", page]) == 1
    assert f"{page} does not answer like a gateway" in capsys.readouterr().err


@pytest.mark.parametrize(
    "says", [b"{}", b"[]", b"null", b"[{}]", b'{"data": 3}', b'{"data": [{}]}', b'{"verdict": {}}', b"[" * 100_000]
)
def test_who_answers_with_json_of_another_shape_is_no_gateway(says: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    class Json(Page):
        pass

    Json.says = says
    asking = (*COMMANDS, ["reload"], ["explain", "--tokens", "3"], ["explain", "--prompt", "x", "--model", "m"])
    with serving(Json) as url:
        for command in (*asking, ["drain", "east:west"]):
            assert main([*command, "-u", url]) == (2 if command[0] == "explain" else 1)
            assert f"{url} does not answer like a gateway" in capsys.readouterr().err


def test_a_link_has_two_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["flows", "--once", "--link", "east"])
    assert ended.value.code == 2
    assert "'east': must be FROM:TO" in capsys.readouterr().err


@on_loop
async def test_a_reload_of_what_needs_a_restart_is_told_by_its_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted: dict[str, int] = {"max_waiting": 7}

    async with world(read_again=lambda config: replace(config, **wanted)) as w:
        for command in (["reload", "--dry-run"], ["reload"]):
            assert await asyncio.to_thread(main, [*command, "-u", w.gateway.url]) == 0
        wanted["workers"] = 2
        for command in (["reload", "--dry-run"], ["reload"], ["reload", "--json"]):
            assert await asyncio.to_thread(main, [*command, "-u", w.gateway.url]) == 3
        assert "restart the gateway to change workers" in capsys.readouterr().err
