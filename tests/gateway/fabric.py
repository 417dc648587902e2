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
        self._blocks: dict[str, tuple[str, list[bytes]]] = {}  # by transfer: whose landing it is, and of what
        self._landed: dict[str, set[bytes]] = {}  # by node

    def expect(self, transfer_id: str, node_id: str, hashes: list[bytes]) -> int:
        """`open`, of a prompt with these blocks; how many of them have landed on this node before."""
        self.open(transfer_id)
        self._blocks[transfer_id] = node_id, hashes
        landed = self._landed.get(node_id, set())
        return next((number for number, block in enumerate(hashes) if block not in landed), len(hashes))

    def open(self, transfer_id: str) -> None:
        self._transfers[transfer_id] = asyncio.get_running_loop().create_future()

    def open_once(self, transfer_id: str) -> None:
        """For results that may come in any order."""
        if transfer_id not in self._transfers:
            self.open(transfer_id)

    def end(self, transfer_id: str, reason: str = "") -> None:
        future = self._transfers.get(transfer_id)
        if future is not None and not future.done():
            future.set_result(reason)
            if not reason and transfer_id in self._blocks:
                node_id, hashes = self._blocks[transfer_id]
                self._landed.setdefault(node_id, set()).update(hashes)

    async def landed(self, transfer_id: str) -> str:
        """ "" once the KVCache is there, else why it never will be."""
        future = self._transfers.get(transfer_id)
        return await asyncio.shield(future) if future else "unknown_transfer"

    async def render(self, http: web.Request) -> web.Response:
        self.asked_to_render.append(json.loads(await http.read()))
        if self.rendered is None:
            raise web.HTTPNotFound
        return web.json_response(self.rendered, status=self.render_status)
