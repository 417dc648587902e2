"""What stands for the transport between scripted nodes, and what their engines say of prompts."""

import asyncio
import json
from typing import Any

from aiohttp import web


class Fabric:
    """Transfers by id: unsettled, landed (with the tokens that the prefill reused) or given up (with a reason)."""

    def __init__(self) -> None:
        self.rendered: Any = None  # what engines say that a request stands for; None: they do not say such things
        self.render_status = 200
        self.asked_to_render: list[dict[str, Any]] = []
        self._transfers: dict[str, asyncio.Future[str]] = {}

    def open(self, transfer_id: str) -> None:
        self._transfers[transfer_id] = asyncio.get_running_loop().create_future()

    def open_once(self, transfer_id: str) -> None:
        """For those of whom nobody knows who comes first."""
        if transfer_id not in self._transfers:
            self.open(transfer_id)

    def end(self, transfer_id: str, reason: str = "") -> None:
        future = self._transfers.get(transfer_id)
        if future is not None and not future.done():
            future.set_result(reason)

    async def landed(self, transfer_id: str) -> str:
        """ "" once the KVCache is there, else why it never will be."""
        future = self._transfers.get(transfer_id)
        return await asyncio.shield(future) if future else "unknown_transfer"

    async def render(self, http: web.Request) -> web.Response:
        self.asked_to_render.append(json.loads(await http.read()))
        if self.rendered is None:
            raise web.HTTPNotFound
        return web.json_response(self.rendered, status=self.render_status)
