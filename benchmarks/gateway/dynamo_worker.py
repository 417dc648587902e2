"""A worker of Dynamo that answers at once, as the engine of http_ends.c does, for its frontend in benchmarks.gateway.

    python -m benchmarks.gateway.dynamo_worker MODEL_DIRECTORY

Runs in Dynamo's environment; says one line of JSON when its model is known and ends with its standard input. Where workers and
frontends find each other is a folder (DYN_FILE_KV), so neither etcd nor NATS is needed.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

BLOCK_TOKENS = 64
CONTEXT_TOKENS = 10_000_000  # no prompt here is too long


async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """As many tokens as are asked for, each on its own; "seed" is the pause between two of them in ms (0: none)."""
    tokens = request["stop_conditions"].get("max_tokens") or 1
    pause_s = (request["sampling_options"].get("seed") or 0) / 1e3
    for number in range(tokens):
        if number and pause_s:
            await asyncio.sleep(pause_s)
        yield {"token_ids": [6634], "finish_reason": "stop" if number == tokens - 1 else None, "index": 0}


async def serve(model: str) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("prfaas.engines.generate")
    limits = ModelRuntimeConfig()
    limits.context_length = CONTEXT_TOKENS
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        model,
        "mock",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_TOKENS,
        runtime_config=limits,
    )
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    print(json.dumps({"model": model}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    runtime.shutdown()
    await serving


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
