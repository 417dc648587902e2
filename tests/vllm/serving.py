"""A system of two real vLLM servers, with a slow link between them, and what is asked of it."""

from typing import Any

import openai

from tests.e2e.harness import Bench
from tests.transport.proxy import Proxy

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
