"""Asks pairs of vLLM servers for completions and says when the first token came; JSON lines in, JSON lines out.

Runs where the decode server is, as its users do: in the second network namespace when there is a link in between.
"""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from prfaas.demo.client import complete
from prfaas.errors import PrfaasError

READY_TIMEOUT_S = 900.0
POLL_S = 0.2


async def main() -> None:
    print(json.dumps({"ready": True}), flush=True)
    async with aiohttp.ClientSession() as session:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            try:
                answer = await OPERATIONS[request.pop("do")](session, **request)
            except (PrfaasError, aiohttp.ClientError, OSError, KeyError) as exc:
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            print(json.dumps(answer), flush=True)


async def wait(
    session: aiohttp.ClientSession, url: str, nodes: int = 0, timeout_s: float = READY_TIMEOUT_S
) -> dict[str, Any]:
    """Until a server is well, or a gateway sees that many nodes."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200 and (not nodes or (await answer.json())["nodes_ready"] >= nodes):
                        return {}
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(POLL_S)


async def ours(session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Through the gateway, which asks both servers at once."""
    name = uuid.uuid4().hex
    done = await complete(session, url, _body(prompt, max_tokens), name)
    record = await _record(session, url, name)
    return {
        "ttft_s": done.ttft_s,
        "token_ids": done.token_ids,
        "overlap": record["overlap"],
        "bytes": record["bytes"],
        "fallbacks": record["fallbacks"],
        "timeline": record["timeline"],
    }


async def nixl(
    session: aiohttp.ClientSession, prefill_url: str, url: str, prompt: list[int], max_tokens: int
) -> dict[str, Any]:
    """As its proxies do: the prefill server first, then its answer's parameters to the decode server."""
    started = time.monotonic()
    leg = _body(prompt, 1) | {
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    }
    name = uuid.uuid4().hex
    async with session.post(f"{prefill_url}/v1/completions", json=leg, headers={"x-request-id": name}) as answer:
        answer.raise_for_status()
        params = (await answer.json())["kv_transfer_params"]
    prefilled_s = time.monotonic() - started
    done = await complete(session, url, _body(prompt, max_tokens) | {"kv_transfer_params": params}, name)
    # The decode server reads the blocks, and learns of them only now: nothing can have left before.
    return {"ttft_s": prefilled_s + done.ttft_s, "token_ids": done.token_ids, "overlap": 0.0}


def _body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def _record(session: aiohttp.ClientSession, url: str, name: str) -> dict[str, Any]:
    async with asyncio.timeout(10.0):
        while True:
            async with session.get(f"{url}/prfaas/requests") as answer:
                for line in (await answer.text()).splitlines():
                    record: dict[str, Any] = json.loads(line)
                    if record["id"] == name:
                        return record
            await asyncio.sleep(0.02)


OPERATIONS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {"wait": wait, "ours": ours, "nixl": nixl}

if __name__ == "__main__":
    asyncio.run(main())
