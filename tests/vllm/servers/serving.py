"""A system of two real vLLM servers, with a slow link between them, and what is asked of it."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import openai

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.served_model import salt_of
from hybrid_cache.cache.events import BlocksStored, Medium
from hybrid_cache.hashing.block_hash import Inset, block_hashes, tokens_digest
from hybrid_cache.layout.layout import ModelLayout
from tests.e2e.harness import Bench
from tests.transport.proxy import Proxy
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.control.tickets import ticket_info

CHUNK = 256
LINK_BYTES_PER_S = 12.5e6  # 100 Mbit/s for each connection
# What real ones look at; and what a critic says depends on a flag of the server's that no gateway knows.
TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.role == 'critic' %}{{ critic | default('') }}{% endif %}
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}()
{% endif %}{% endif %}"""


def document(model: str, relay: Proxy) -> dict[str, Any]:
    """Two nodes, one vLLM server each; KVCache passes the relay on its way from the first to the second.

    The PD cluster has no prefill node of its own, so prompts of any length are prefilled remotely.
    """
    decode = {"transfer_port": int(relay.upstream.rpartition(":")[2]), "transfer_advertise": relay.address}
    return {
        "model": {"path": model, "name": "tiny"},
        "gateway": {"port": 0, "threshold_tokens": 300, "routing": {"prefill_tokens_per_s": 1000.0}},
        "node": {
            "engine": "vllm",
            "engine_args": [
                "--dtype",
                "float32",
                "--num-gpu-blocks-override",
                "512",
                "--default-chat-template-kwargs",
                '{"critic": "of nothing: "}',
            ],
            "chunk_tokens": CHUNK,
            "max_model_len": 4096,
            "cache_bytes": 128 << 20,
            "lease_s": 60.0,
        },
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode", **decode}]},
        ],
    }


async def ask(url: str, stream: bool, call: dict[str, Any], **extra: Any) -> tuple[str, str, int, int]:
    """Text, reason of its end, prompt and completion tokens."""
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        create: Any = client.chat.completions.create if "messages" in call else client.completions.create
        if not stream:
            answer = await create(**call, extra_body=extra)
            choice, usage = answer.choices[0], answer.usage
            text = choice.message.content if "messages" in call else choice.text
            assert usage.prompt_tokens_details is not None
            return text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens
        text, reason, usage = "", "", None
        async for chunk in await create(**call, stream=True, stream_options={"include_usage": True}, extra_body=extra):
            for choice in chunk.choices:
                text += (choice.delta.content if "messages" in call else choice.text) or ""
                reason = choice.finish_reason or reason
            usage = chunk.usage or usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return text, reason, usage.prompt_tokens, usage.completion_tokens


async def posted(bench: Bench, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with bench.session.post(url, json=body) as answer:
        said: dict[str, Any] = await answer.json()
        return said


async def is_sending(bench: Bench) -> bool:
    """Whether KVCache is on its way from the node that prefills. Hold the link meanwhile: it may arrive between two looks."""
    return bool((await bench.describe("far")).load.sending)


async def leg_params(bench: Bench, node: str, prompt: Sequence[int], insets: Sequence[Inset] = ()) -> dict[str, Any]:
    """What a prefill leg is told whose KVCache a node waits for: that node has reserved its place."""
    layout = ModelLayout.from_json((await bench.describe(node)).layout_json)
    salt = salt_of(layout)
    reservation = pb.ReserveRequest(
        block_hashes=b"".join(block_hashes(prompt[:-1], layout.block_size, salt, insets=insets)),
        num_tokens=len(prompt) - 1,
        tokens_digest=tokens_digest(prompt, salt, insets),
        ttl_s=60.0,
    )
    async with bench.system.agent_channel(node) as channel:
        ticket = ticket_info(await rpc.NodeAgentStub(channel).Reserve(reservation, timeout=10.0))
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "ticket": json.loads(msgspec.json.encode(ticket)),
        "salt": salt.hex(),
    }


async def heard(bench: Bench, node: str, wanted: Collection[bytes], medium: Medium) -> None:
    """Waits until a node has told of blocks that it holds there, in its first group."""
    agent, known = AgentClient(bench.node(node).agent_address, 5.0), set[bytes]()
    try:
        async with asyncio.timeout(30.0), contextlib.aclosing(agent.watch(0.25, 10.0)) as events:
            async for event in events:
                if isinstance(event, BlocksStored) and event.medium is medium and event.group == 0:
                    known.update(event.hashes)
                if known.issuperset(wanted):
                    return
    finally:
        await agent.close()


async def leg_whose_push_fails(bench: Bench, relay: Proxy, prompt: Sequence[int]) -> dict[str, Any]:
    """What a prefill leg answers whose KVCache is refused once its first blocks have arrived."""
    far, agent = bench.node("far"), AgentClient(bench.node("decode0").agent_address, 5.0)
    params = await leg_params(bench, "decode0", prompt)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
    engine, first_blocks = (await bench.describe("far")).engine_pid, relay.total + (128 << 10)

    async def sends_nothing() -> bool:
        return not await is_sending(bench)

    async def is_ready() -> bool:
        return await bench.gateway_sees("far") == "ready"

    await bench.wait_until(is_ready)  # an engine that is stopped as often as here may be taken for silent
    leg = asyncio.create_task(posted(bench, f"{far.engine_url}/v1/completions", body))
    try:
        await _run_slowly(engine, lambda: relay.total >= first_blocks or leg.done())
        await agent.abort(params["ticket"]["transfer_id"], "in this test")
        await bench.wait_until(sends_nothing)
    finally:
        os.kill(engine, signal.SIGCONT)
        await agent.close()
    return await leg


async def _run_slowly(pid: int, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Lets a process run for a tenth of the time, behind all others, and stops it when something has come about."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)  # it stays so: only root could take it back
    async with asyncio.timeout(timeout_s):
        while not until():
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
