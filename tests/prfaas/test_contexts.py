"""Kept prefixes, from a client's mark to a node's memory: real processes, engines that notice a wrong byte of KVCache."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from engine.byte_tokenizer import save_byte_tokenizer
from gateway.auth.keyring import digest_of
from prfaas.system.system import System
from prfaas.system.topology import parse_topology

KEYS = {"acme": "sk-acme", "globex": "sk-globex"}
SYSTEM = "You answer in few words. " * 24  # bytes are tokens
BLOCK = 16
MODEL = "tiny"


def hybrid(directory: Path, *, cache_bytes: int) -> System:
    """A prefill node and a decode node with linear states, and two tenants."""
    model = directory / "models" / "kimi_linear-0"
    model.mkdir(parents=True)
    save_byte_tokenizer(model, 4096)
    document = {
        "model": {"arch": "kimi_linear", "name": MODEL},
        "gateway": {
            "port": 0,
            "metrics_port": 0,
            "tenants": {name: {"keys": [digest_of(key)], "pinned_tokens": 1024} for name, key in KEYS.items()},
        },
        "node": {"engine": "emulated", "cache_bytes": cache_bytes, "block_size": BLOCK},
        "clusters": [
            {
                "name": "west",
                "kind": "pd",
                "nodes": [{"node_id": "p0", "role": "prefill"}, {"node_id": "d0", "role": "decode"}],
            }
        ],
    }
    return System(parse_topology(document, directory), directory / "run", lambda line: None)


def chat(question: str, *, system: str = SYSTEM, marked: bool = True) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "text", "text": system}
    if marked:
        part["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "5m"}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}


def test_a_marked_prefix_is_kept_for_its_tenant_until_it_is_deleted(tmp_path: Path) -> None:
    system = hybrid(tmp_path, cache_bytes=8 << 20)

    async def scenario() -> None:
        async with system, aiohttp.ClientSession(system.api_url) as http:

            async def ask(body: dict[str, Any], tenant: str = "acme") -> dict[str, Any]:
                headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
                async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
                    told: dict[str, Any] = await answer.json()
                    assert answer.status == 200, told
                    return told

            async def contexts(tenant: str = "acme", delete: str = "") -> tuple[int, dict[str, Any]]:
                headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
                way = (
                    http.delete(f"/v1/contexts/{delete}", headers=headers)
                    if delete
                    else http.get("/v1/contexts", headers=headers)
                )
                async with way as answer:
                    return answer.status, await answer.json()

            first = await ask(chat("What is a cache?"))
            details = first["usage"]["prompt_tokens_details"]
            (kept,) = details["breakpoints"]
            assert details["cached_tokens"] == 0
            assert details["cache_write_tokens"] == kept["kept"] > len(SYSTEM) // BLOCK * BLOCK - BLOCK
            assert kept["kept"] % BLOCK == 0
            # The state at exactly that length is there for a question that differs at once.
            second = await ask(chat("And why?"))
            told = second["usage"]["prompt_tokens_details"]
            assert (told["cached_tokens"], told["cache_write_tokens"]) == (kept["kept"], 0)
            unmarked = chat("What is a cache?", system="Nobody marks this one. " * 24, marked=False)
            await ask(unmarked)
            for number in range(24):  # more than memory has room for
                await ask(chat(f"{number:03d} " * 300, system=f"{number} is not it. " * 8, marked=False))
            third = await ask(chat("Then what?", marked=False))
            assert third["usage"]["prompt_tokens_details"]["cached_tokens"] >= kept["kept"]
            assert (await ask(unmarked))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            status, listed = await contexts()
            assert (status, [each["id"] for each in listed["data"]]) == (200, [kept["context"]])
            assert (listed["kept_tokens"], listed["budget_tokens"]) == (kept["kept"], 1024)
            # Another tenant sees none of it, ends none of it, and has no use of it.
            assert (await contexts("globex"))[1]["data"] == []
            assert (await contexts("globex", kept["context"]))[0] == 404
            other = await ask(chat("And why?", marked=False), "globex")
            assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert (
                other["choices"][0]["message"] == second["choices"][0]["message"]
            )  # computed whole, and from the state
            # What is more than a tenant may keep is answered, and not kept.
            beyond = await ask(chat("Hm?", system="Another one. " * 60))
            (refused,) = beyond["usage"]["prompt_tokens_details"]["breakpoints"]
            assert (refused["kept"], refused["reason"]) == (0, "over_budget")
            assert (await contexts(delete=kept["context"]))[1]["deleted"]
            assert (await contexts())[1]["data"] == []

    asyncio.run(scenario())
