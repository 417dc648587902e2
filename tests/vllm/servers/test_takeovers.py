"""Decode nodes that die under their streams, with real vLLM servers: another one goes on, and the client sees no seam."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Bench
from tests.transport.path.ports import free_port
from tests.transport.proxy import Proxy
from tests.vllm.cases import build
from tests.vllm.servers.test_serving import ARCH, LINK_BYTES_PER_S, counted, document, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="takeovers")]

TOKENS = 800
ATTEMPTS = 5  # an answer may be over before its server is killed: how fast or busy this machine is, is not known


@pytest.fixture(scope="module")
def bench(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = build(ARCH, models)
    with Proxy(f"127.0.0.1:{free_port()}", LINK_BYTES_PER_S) as relay:
        asked = document(str(model), relay)
        asked["clusters"][1]["nodes"].append({"node_id": "decode1", "role": "decode"})
        with Bench(asked, model, tmp_path_factory.mktemp("takeovers")) as running:
            yield running


async def kill_server(bench: Bench, node_id: str) -> None:
    """The process with the model; its agent starts another server."""
    os.kill((await bench.describe(node_id)).engine_pid, signal.SIGKILL)


@pytest.mark.parametrize(("path", "after"), [("chat/completions", 7), ("completions", 30)])
def test_a_stream_whose_server_dies_goes_on_elsewhere(bench: Bench, path: str, after: int) -> None:
    async def scenario() -> None:
        async def all_are_ready() -> bool:
            return [await bench.gateway_sees(node) for node in ("far", "decode0", "decode1")] == ["ready"] * 3

        prompt: dict[str, Any] = {"prompt": bench.prompt(700, seed=after)}
        if "chat" in path:
            prompt = {"messages": [{"role": "user", "content": "What goes on? " * 60}]}
        body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, **prompt}
        body |= {"stream_options": {"include_usage": True}}
        await bench.wait_until(all_are_ready, 240.0)
        whole = await streamed(body, bench.name())
        for _ in range(ATTEMPTS):
            await bench.wait_until(all_are_ready, 240.0)
            await bench.wait_idle()
            name = bench.name()
            events = await streamed(body, name, after)
            record = await bench.record(name)
            if record["takeovers"]:
                break
        assert text_of(events) == text_of(whole)
        assert counted(events) == counted(whole)
        assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
        assert not any("token_ids" in choice and choice["token_ids"] for e in events for choice in e["choices"])
        assert record["takeovers"] == 1
        (reason,) = record["fallbacks"]  # nothing else: a prefill node computed prompt and answer so far, and sent them
        assert reason in ("decode_stream_broken", "decode_stream_error")  # vLLM may have time to say so
        assert (record["route"], record["prefill_node"]) == ("remote", "far")

    async def streamed(body: dict[str, Any], name: str, killed_after: int = 0) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        url, headers = f"{bench.system.api_url}/v1/{path}", {"x-request-id": name}
        async with bench.session.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                    assert "error" not in events[-1], events[-1]
                if killed_after and len(events) == killed_after:
                    killed_after = 0
                    if node := await who_decodes():
                        await kill_server(bench, node)
        return events

    async def who_decodes() -> str | None:
        """None: the answer is over. A server says now and then what it runs, so one look tells nothing."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and await bench.metric(bench.system.api_url, "prfaas_requests_in_flight"):
            for node in ("decode0", "decode1"):
                if (await bench.describe(node)).load.running:
                    return node
        return None

    bench.run(scenario(), 600.0)
