"""What the gateway answers over both legs is what one plain vLLM server answers, whatever a call asks for."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.harness import Bench
from tests.transport.path.ports import free_port
from tests.transport.proxy import Proxy
from tests.vllm.cases import build
from tests.vllm.servers.calls import Call, calls, difference, told_in
from tests.vllm.servers.serving import CHUNK, LINK_BYTES_PER_S, TEMPLATE, document
from tests.vllm.servers.test_serving import ARCH

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.dimensions(start="calls")]

START_S = 600.0
FLAGS = [
    *["--dtype", "float32", "--num-gpu-blocks-override", "512"],
    *["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
    # Else a model of random weights writes blanks for ever.
    *["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'],
]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


class Plain:
    """A vLLM server that has never heard of us."""

    def __init__(self, model: Path, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
        # Prompts in one piece: of a seeded one in several vLLM's CPU build dies, unless our connector is there to mend it.
        command += ["--max-num-batched-tokens", "4096", "--max-num-seqs", str(CHUNK), "--max-model-len", "4096"]
        self.log = folder / "plain.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *FLAGS],
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT | {"VLLM_RPC_BASE_PATH": str(folder)},
            )

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            try:
                async with session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60.0)


@pytest.fixture(scope="module")
def model(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("model") / ARCH
    shutil.copytree(build(ARCH, models), copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    started = Plain(model, tmp_path_factory.mktemp("plain"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def bench(model: Path, plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Proxy(f"127.0.0.1:{free_port()}", LINK_BYTES_PER_S) as relay:
        asked = document(str(model), relay)
        asked["node"]["engine_args"] = FLAGS
        asked["gateway"]["threshold_tokens"] = 1
        with Bench(asked, model, tmp_path_factory.mktemp("calls")) as running:
            running.run(plain.wait_ready(running.session), START_S)
            yield running


async def answered(bench: Bench, url: str, call: Call, name: str) -> Any:
    headers = {"x-request-id": name}
    async with bench.session.post(
        f"{url}/v1/{call.endpoint}", json={"model": "tiny"} | call.body, headers=headers
    ) as answer:
        body = await answer.read()
        assert answer.status == 200, body.decode()
        return told_in(body, streamed=bool(call.body.get("stream")))


def test_two_parts_of_a_tool_call_say_the_same_in_one_event_and_in_two() -> None:
    """A server that has computed two tokens before it tells of the first one puts both into one event."""
    named = {"index": 0, "type": "function", "function": {"name": "weather"}}
    filled = {"index": 0, "function": {"arguments": "null"}}

    def streamed(*deltas: list[dict[str, Any]]) -> bytes:
        events = [{"choices": [{"index": 0, "delta": {"tool_calls": delta}}]} for delta in deltas]
        lines = [*map(json.dumps, events), json.dumps({"choices": [], "usage": {"total_tokens": 2}})]
        return "".join(f"data: {line}\n\n" for line in lines).encode()

    together = told_in(streamed([named, filled]), streamed=True)
    apart = told_in(streamed([named], [filled]), streamed=True)
    assert not difference(together, apart)
    assert together["choices"][0]["delta"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "null"}


def test_there_are_many() -> None:
    assert len({call.name for call in calls()}) == len(calls()) >= 100


@pytest.mark.dimensions(call=None)  # any of them will do
@pytest.mark.parametrize("call", calls(), ids=lambda call: call.name.replace(" ", "-"))
def test_it_is_answered_as_by_one_server(bench: Bench, plain: Plain, call: Call) -> None:
    async def scenario() -> None:
        name = bench.name()
        ours, theirs = (
            await answered(bench, bench.system.api_url, call, name),
            await answered(bench, plain.url, call, name),
        )
        assert not difference(ours, theirs)
        await bench.record(name)
        records = [record for record in await all_records(bench) if record["id"] == name]
        # The second answer to one prompt waits for what the first one computes, and on a busy machine no longer than is worth it.
        allowed = {"prefix_late"} if call.answers > 1 else set()
        assert all(set(record["fallbacks"]) <= allowed for record in records)
        assert len(records) == call.answers
        is_remote = [record["route"] == "remote" for record in records]
        assert is_remote == [call.is_shared] * call.answers
        assert (
            any(record["bytes"] for record in records) == call.is_shared
        )  # others may find what the first one brought

    bench.run(scenario())
    bench.run(bench.wait_idle())


async def all_records(bench: Bench) -> list[dict[str, Any]]:
    async with bench.session.get(f"{bench.system.api_url}/prfaas/requests") as answer:
        return [json.loads(line) for line in (await answer.text()).splitlines()]
