"""Every view of the console in a real browser, before nodes whose link has failed: Chromium, by its DevTools protocol."""

import asyncio
import base64
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.auth.keyring import digest_of
from gateway.config.tenants import TenantConfig
from tests.gateway.admission.test_slo import LONG
from tests.gateway.worlds import PATIENCE_S, on_loop, world

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """A page in a browser. What the page complained of is in `complaints`."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._ws = ws
        self._numbers = count(1)
        self._session: str | None = None

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        await self._ws.send_str(json.dumps({"id": number, "method": method, "params": params, **session}))
        while True:
            said = json.loads((await self._ws.receive(PATIENCE_S)).data)
            if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(said["params"]))
            if said.get("id") == number:
                assert "error" not in said, said
                found: dict[str, Any] = said["result"]
                return found

    async def open(self, url: str, key: str = "") -> None:
        """With an operator's `key`, sent as a browser sends what its user was asked for."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        if key:
            basic = base64.b64encode(f"op:{key}".encode()).decode()
            await self.call("Network.enable")
            await self.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {basic}"})
        await self.call("Page.navigate", url=url)

    async def says(self, expression: str) -> Any:
        """The value of a JavaScript expression there."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def press(self, label: str) -> None:
        """Clicks the button that says so."""
        button = f"[...document.querySelectorAll('button')].find((each) => each.textContent === {json.dumps(label)})"
        await self.until(f"{button} !== undefined")
        await self.says(f"{button}.click()")

    async def until(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not await self.says(expression):
            assert time.monotonic() < deadline, (
                expression,
                await self.says("document.body.innerText"),
                self.complaints,
            )
            await asyncio.sleep(0.02)

    async def until_told(self, *words: str) -> None:
        """Waits for a page on which all of these can be read."""
        for each in words:
            await self.until(f"document.body.innerText.includes({json.dumps(each)})")


@asynccontextmanager
async def browser(home: Path) -> AsyncIterator[Page]:
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
        "--remote-debugging-port=0", f"--user-data-dir={home}",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        async for line in process.stderr:
            if b"listening on ws://" in line:
                break
        else:
            raise AssertionError("the browser did not start")
        url = line.decode().split()[-1]
        reading = asyncio.ensure_future(process.stderr.read())  # else it would block on a full pipe
        async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=0) as ws:
            yield Page(ws)
        process.terminate()
        await process.wait()
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to show the page in")
@on_loop
async def test_every_view_shows_a_system_whose_link_has_failed(tmp_path: Path) -> None:
    async with world(remote=2, local=1, decode=1) as w, browser(tmp_path) as page:
        for node in w.nodes.remote:
            node.script.path_is_down = True
        for i in range(2):
            await w.complete(f"{i} {LONG}", headers={"x-request-id": f"noticed-{i}"})
        await w.idle()
        await page.open(f"{w.gateway.url}/console")
        await page.until_told("Clusters and links", "east → west", "down, open")
        await page.until("document.querySelector('.topology .link.down') !== null")
        assert await page.says("document.querySelectorAll('.topology .node').length") == 4
        await page.says("document.querySelector('.topology .link').dispatchEvent(new MouseEvent('click'))")
        await page.until_told("Senders", "Drain it for maintenance")
        for words, told in (
            ("Drain it for maintenance", "Drained: nothing new"),
            ("Use it again", "Down: long prompts stay"),
        ):
            await page.press(words)
            await page.press("Yes, do")
            await page.until_told(told)
        await page.says("location.hash = 'traffic'")
        await page.until_told("Threshold", "link_down")
        await page.until("document.querySelectorAll('.u-wrap canvas').length === 2")
        await page.until_told("Tenants with the most tokens", "Of this gateway, since it started.")
        await page.says("location.hash = 'nodes'")
        await page.until_told("Promises", "FullAttention 0", "d0", "r1")
        await page.says("location.hash = 'egress'")
        await page.until_told("What crossed lately", "Moves, copies and probes")
        await page.says("location.hash = 'requests'")
        await page.until_told("2 of the last 2, newest first")
        await page.says("document.querySelector('.waterfall').click()")
        await page.until_told("noticed-1")
        await page.says("location.hash = 'try'")
        await page.until_told("A test request")
        await page.says("document.getElementById('tokens').value = '1000'")
        await page.says("document.querySelector('form button').click()")
        await page.until_told(
            "Prefill on p0, decode on d0.", "no link from them to west carries anything", "Decode candidates"
        )
        assert not await page.says("document.body.textContent.includes('[object')")
        assert await page.says("document.querySelectorAll('.topology .node.lit').length") == 2
        await page.says("location.hash = 'plan'")
        await page.until_told("No plan service is configured")
        assert not await page.says("document.body.textContent.includes('[object')")
        assert page.complaints == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to show the page in")
@on_loop
async def test_where_there_are_tenants_a_test_request_is_sent_with_ones_key(tmp_path: Path) -> None:
    tenants = {"acme": TenantConfig(keys=(digest_of("sk-acme"),))}
    async with world(tenants=tenants, operator_keys=(digest_of("sk-op"),)) as w, browser(tmp_path) as page:
        await page.open(f"{w.gateway.url}/console#try", key="sk-op")
        await page.until_told("A test request")
        hidden = "[...document.querySelectorAll('button')].find((each) => each.textContent === 'Send it').hidden"
        await page.until(f"{hidden} && !document.getElementById('key').hidden")
        await page.says(
            "const key = document.getElementById('key'); key.value = 'sk-acme'; key.dispatchEvent(new Event('input'))"
        )
        await page.press("Send it")
        await page.until_told("Answered in", "tokens cached")
        assert page.complaints == []
