"""Two nodes that take picked requests, and what is asked of them."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from node.config import PICKED
from node.grpc_service import NodeService
from node.metrics import server_page
from node.picked.port import PREFILLER, PickedPort
from tests.node.running import RunningNode, config, running_node, until

MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class PickedNode:
    """A node, and where it takes picked requests."""

    node: RunningNode
    port: PickedPort

    @property
    def address(self) -> str:
        return self.port.url.partition("://")[2]

    async def complete(
        self, prompt: Sequence[int] | str, max_tokens: int = 8, *, prefiller: str = "", **options: Any
    ) -> dict[str, Any]:
        """A whole answer, which must be one."""
        status, told = await self.ask(prompt, max_tokens, prefiller=prefiller, **options)
        assert status == 200, told
        return told

    async def ask(
        self, prompt: Sequence[int] | str, max_tokens: int = 8, *, prefiller: str = "", **options: Any
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer of a completion."""
        async with self.asking(prompt, max_tokens, prefiller=prefiller, **options) as answer:
            return answer.status, await answer.json()

    def asking(
        self, prompt: Sequence[int] | str, max_tokens: int = 8, *, prefiller: str = "", **options: Any
    ) -> Any:
        """The request, to be entered."""
        text = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": MODEL, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {PREFILLER: prefiller} if prefiller else {}
        body |= {"return_token_ids": True} | options
        return self.node.http.post(f"{self.port.url}/v1/completions", json=body, headers=headers)

    async def idle(self) -> None:
        """Nothing is held any more, and the books balance."""

        async def is_idle() -> bool:
            pool = (await self.node.describe()).pool
            return not (pool.reservations or pool.pages_locked or pool.pages_transfer)

        await until(is_idle)
        assert not (await self.node.describe()).integrity_error

    async def bytes_landed(self) -> int:
        assert self.node.agent.incoming is not None
        return self.node.agent.incoming.counts.bytes_landed


@contextlib.asynccontextmanager
async def picked_node(tmp_path: Path, **changes: Any) -> AsyncIterator[PickedNode]:
    """A node with an emulated engine, unless `changes` say otherwise."""
    settings = config(tmp_path, picked_port=0, served_model=MODEL, **changes)
    async with running_node(settings) as node:
        port = PickedPort(node.agent, NodeService(node.agent, time.monotonic), partial(server_page, node.agent))
        try:
            await port.start(settings.port(PICKED))
            yield PickedNode(node, port)
        finally:
            await port.close()


@contextlib.asynccontextmanager
async def pair(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[PickedNode, PickedNode]]:
    """A node that prefills and one that decodes."""
    async with (
        picked_node(tmp_path, role="prefill", **changes) as prefill,
        picked_node(tmp_path, role="decode", **changes) as decode,
    ):
        yield prefill, decode


def tokens_of(told: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    found: list[int] = told["choices"][0]["token_ids"]
    return found


async def text_of(answer: aiohttp.ClientResponse) -> str:
    """All that a stream says."""
    return (await answer.read()).decode()
