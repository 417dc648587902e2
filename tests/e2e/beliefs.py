"""What a gateway believes of its nodes: it hears of them up to 0.1 s late."""

from collections.abc import Sequence
from typing import Any, Final

import aiohttp

BY_LOAD: Final = ("congested", "remote_queue")
"""Reasons of routes that another moment may change."""


async def known_tokens(session: aiohttp.ClientSession, api_url: str, name: str, prompt: Sequence[int]) -> int:
    """How many tokens of `prompt` the gateway believes that node to have."""
    found = await _candidates(session, api_url, prompt)
    return max(
        (each["cached_tokens"] for each in found if each["node"] == name and not each.get("fetch_from")), default=0
    )


async def believed_queues_s(session: aiohttp.ClientSession, api_url: str) -> dict[str, float]:
    """How long a prompt would wait at each node where the gateway believes that it would."""
    found = await _candidates(session, api_url, [1, 2])
    return {each["node"]: each["queue_s"] for each in found if each.get("queue_s", 0.0) > 0}


async def is_sent_home(session: aiohttp.ClientSession, api_url: str, prompt: Sequence[int]) -> bool:
    """Whether load would keep `prompt` from the link now."""
    route = (await _decision(session, api_url, prompt)).get("route", {})
    return route.get("reason") in BY_LOAD


async def _candidates(session: aiohttp.ClientSession, api_url: str, prompt: Sequence[int]) -> list[dict[str, Any]]:
    """What the gateway would choose the nodes of `prompt` from; nothing while no node serves it."""
    decision = await _decision(session, api_url, prompt)
    return [*decision.get("decodes", ()), *decision.get("prefills", ())]


async def _decision(session: aiohttp.ClientSession, api_url: str, prompt: Sequence[int]) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1}
    async with session.post(f"{api_url}/prfaas/explain", json=body) as answer:
        found: dict[str, Any] | None = (await answer.json()).get("decision")
    return found or {}
