"""SGLang servers as nodes behind our gateway: answers are those of one server alone, by every way that a request can go.

Started once for all tests: a PrfaaS node, a prefill and a decode node of a PD cluster, and the server to compare with. Weights
are float32 and answers greedy, so that a text tells which tokens were computed.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.transport.path.ports import free_port

pytest.importorskip("torch")
pytest.importorskip("sglang")

from engine.torch.tiny import build_model
from gateway.cluster.agent_client import AgentClient
from gateway.errors import AgentCallFailed
from node.engine.liveness import has_ended
from node.engine.shm_cleanup import SHARED
from node.process.children import members
from tests.e2e.harness import Bench
from tests.sglang.serving import PAGE, THRESHOLD, Alone, document, kernels_stood_in
from transport.control.proto import node_pb2 as pb

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]

WORDS = (
    "the",
    "river",
    "bends",
    "north",
    "where",
    "old",
    "stones",
    "keep",
    "quiet",
    "names",
    "under",
    "a",
    "pale",
    "moon",
)
SHORT, LONG = 4, 120  # words, of some five tokens
BACK_S = 300.0
SOON_S = 30.0  # for what has nothing to wait for, on a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model") / "llama"
    build_model("llama", directory, 0, overwrite=False, report=lambda line: None)
    return directory


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    server = Alone(model, tmp_path_factory.mktemp("alone"), free_port())
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def bench(model: Path, alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with kernels_stood_in(), Bench(document(model), model, tmp_path_factory.mktemp("serving")) as running:
        alone.wait()
        yield running
        servers = [running.run(server_of(running, node)) for node in running.system.nodes]
        shared = {file for server in servers for file in shared_memory_of(server)}
    assert shared
    assert not [file for file in shared if file.exists()]
    # A process that has ended without a parent waits for this machine's first process to ask for its status.
    assert not [process for server in servers for process in members(server) if not has_ended(int(process.name))]


async def server_of(bench: Bench, node: str) -> int:
    """The process that leads a node's engine: what says Hello is a child of it."""
    return os.getpgid((await bench.describe(node)).engine_pid)


def shared_memory_of(server: int) -> set[Path]:
    """Files in /dev/shm that processes of a server have mapped: its node's arena, and what SGLang shares."""
    found: set[Path] = set()
    for process in members(server):
        with contextlib.suppress(OSError):  # it has ended
            lines = (process / "maps").read_text(errors="replace").splitlines()
            found |= {Path(line[line.index(SHARED) :]) for line in lines if SHARED in line and " (deleted)" not in line}
    return found


def call(num_words: int, seed: int, **options: Any) -> tuple[str, dict[str, Any]]:
    """A path and a body: of a chat if the seed is odd."""
    chance = random.Random(seed)
    said = " ".join(chance.choice(WORDS) for _ in range(num_words))
    prompt = {"messages": [{"role": "user", "content": said}]} if seed % 2 else {"prompt": said}
    path = "/v1/chat/completions" if seed % 2 else "/v1/completions"
    return path, {"model": "tiny", "max_tokens": 12, "temperature": 0, **prompt, **options}


def answer_of(body: dict[str, Any]) -> tuple[list[tuple[str, str]], int, int]:
    said = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in body["choices"]]
    reasons = [choice["finish_reason"] for choice in body["choices"]]
    return list(zip(said, reasons, strict=True)), body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]


async def asked(bench: Bench, url: str, path: str, body: dict[str, Any], name: str = "") -> tuple[int, dict[str, Any]]:
    async with bench.session.post(url + path, json=body, headers={"X-Request-Id": name or bench.name()}) as answer:
        return answer.status, await answer.json()


async def streamed(bench: Bench, url: str, path: str, body: dict[str, Any]) -> tuple[list[tuple[str, str]], int, int]:
    """As `answer_of`, of an answer in events."""
    text, reason, usage = "", "", {}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    async with bench.session.post(url + path, json=body | more) as answer:
        lines = (await answer.text()).splitlines()
    assert "data: [DONE]" in lines
    for event in (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
            reason = choice["finish_reason"] or reason
    return [(text, reason)], usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("num_words", "target"), [(SHORT, "local"), (LONG, "remote")])
def test_answers_are_those_of_one_server(bench, alone, num_words, target, seed):
    async def scenario():
        path, body = call(num_words, seed)
        name = bench.name()
        status, told = await asked(bench, bench.system.api_url, path, body, name)
        assert status == 200, told
        _, expected = await asked(bench, alone.url, path, body)
        assert answer_of(told) == answer_of(expected)
        record = await bench.record(name)
        assert (record["target"], record["fallbacks"]) == (target, [])
        assert (record["uncached"] > THRESHOLD) == (target == "remote")
        assert record["prefill_node"] == ("far" if target == "remote" else "near")

    bench.run(scenario())


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("num_words", [SHORT, LONG])
def test_streams_are_those_of_one_server(bench, alone, num_words, seed):
    async def scenario():
        path, body = call(num_words, seed)
        expected = await streamed(bench, alone.url, path, body)
        assert await streamed(bench, bench.system.api_url, path, body) == expected

    bench.run(scenario())


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 1}, {"stop": ["cu", "no"]}, {"n": 2}, {"min_tokens": 5}, {"frequency_penalty": 1.0, "max_tokens": 30},
     {"repetition_penalty": 1.3}, {"logit_bias": {"17": 5.0}}],
)  # fmt: skip
def test_how_is_sampled_counts_from_the_first_token_on(bench, alone, options):
    async def scenario():
        path, body = call(15, 100, **options)
        status, told = await asked(bench, bench.system.api_url, path, body)
        assert status == 200, told
        _, expected = await asked(bench, alone.url, path, body)
        assert answer_of(told) == answer_of(expected)

    bench.run(scenario())


@pytest.mark.parametrize("prompt", [[7], [7, 8, 9, 10] * 40, ["the river", "old stones"]])
def test_prompts_of_one_token_of_tokens_and_in_lists(bench, alone, prompt):
    async def scenario():
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        status, told = await asked(bench, bench.system.api_url, "/v1/completions", body)
        assert status == 200, told
        _, expected = await asked(bench, alone.url, "/v1/completions", body)
        assert answer_of(told) == answer_of(expected)

    bench.run(scenario())


def test_log_probabilities_are_those_of_one_server(bench, alone):
    async def scenario():
        path, body = call(15, 101, logprobs=True, top_logprobs=2)
        _, told = await asked(bench, bench.system.api_url, path, body)
        _, expected = await asked(bench, alone.url, path, body)
        mine, theirs = (each["choices"][0]["logprobs"]["content"] for each in (told, expected))
        assert [token["token"] for token in mine] == [token["token"] for token in theirs]
        assert [token["logprob"] for token in mine] == pytest.approx([t["logprob"] for t in theirs], abs=1e-3)

    bench.run(scenario())


def test_requests_at_once_get_their_own_answers(bench, alone):
    async def scenario():
        calls = [call(5 + 9 * number, 200 + number) for number in range(14)]
        told = await asyncio.gather(*(asked(bench, bench.system.api_url, *each) for each in calls))
        expected = await asyncio.gather(*(asked(bench, alone.url, *each) for each in calls))
        assert [status for status, _ in told] == [200] * len(calls)
        assert [answer_of(body) for _, body in told] == [answer_of(body) for _, body in expected]
        await bench.wait_idle()

    bench.run(scenario())


def test_gateways_see_what_a_prefill_server_has_cached(bench):
    """Its own events, under the gateway's names: the second time the prompt is short, but only there."""

    async def scenario():
        path, body = call(LONG, 300)
        for name, reason in ((bench.name(), "long"), (bench.name(), "remote_prefix")):
            status, told = await asked(bench, bench.system.api_url, path, body, name)
            assert status == 200, told
            record = await bench.record(name)
            assert (record["prefill_node"], record["reason"]) == ("far", reason)
        cached = record["total"] // PAGE * PAGE
        assert record["cached"] in (cached, cached - PAGE)
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == record["cached"]

    bench.run(scenario())


def test_a_cache_is_not_shared_across_salts(bench, alone):
    async def scenario():
        path, body = call(LONG, 310)
        _, expected = await asked(bench, alone.url, path, body)
        for salt, reason in ((None, "long"), ("mine", "long"), ("mine", "remote_prefix"), ("other", "long")):
            name = bench.name()
            salted = body if salt is None else body | {"cache_salt": salt}
            _, told = await asked(bench, bench.system.api_url, path, salted, name)
            assert answer_of(told) == answer_of(expected)
            record = await bench.record(name)
            assert (record["reason"], record["cached"] > 0) == (reason, reason == "remote_prefix")

    bench.run(scenario())


@pytest.mark.parametrize("options", [{"echo": True}, {"rid": "mine"}, {"bootstrap_room": 5}])
def test_what_pairs_cannot_do_is_refused(bench, options):
    async def scenario():
        status, told = await asked(bench, bench.system.api_url, *call(SHORT, 4, **options))
        assert (status, told["error"]["code"]) == (400, "unsupported_parameter")

    bench.run(scenario())


def test_a_client_that_leaves_leaves_nothing_behind(bench):
    async def scenario():
        path, body = call(LONG, 400, max_tokens=400, ignore_eos=True, stream=True)
        async with bench.session.post(bench.system.api_url + path, json=body) as answer:
            await answer.content.readuntil(b"\n\n")
        await bench.wait_idle()

    bench.run(scenario())


def test_a_role_is_not_changed(bench):
    async def scenario():
        agent = AgentClient(bench.node("decode0").agent_address, SOON_S)
        try:
            with pytest.raises(AgentCallFailed, match="started for one role"):
                await agent.convert(1, "prefill")
        finally:
            await agent.close()

    bench.run(scenario())


async def is_back(bench: Bench, node: str, gone: int) -> None:
    """Waits for another engine of a node."""

    async def is_ready() -> bool:
        description = await bench.describe(node)
        return description.state == pb.NODE_STATE_READY and description.engine_pid != gone

    await bench.wait_until(is_ready, BACK_S)


def test_a_prefill_server_that_dies_is_followed_by_another(bench, alone):
    async def scenario():
        path, body = call(300, 500)
        _, expected = await asked(bench, alone.url, path, body)
        name, engine = bench.name(), (await bench.describe("far")).engine_pid
        shared = shared_memory_of(await server_of(bench, "far"))
        os.kill(engine, signal.SIGSTOP)  # so that it is in the middle of the request
        asking = asyncio.create_task(asked(bench, bench.system.api_url, path, body, name))

        async def is_waited_for() -> bool:
            return bool(await bench.metric(bench.system.api_url, "prfaas_requests_in_flight")) or asking.done()

        await bench.wait_until(is_waited_for)
        os.kill(engine, signal.SIGKILL)
        status, told = await asking
        assert status == 200, told
        assert answer_of(told) == answer_of(expected)
        record = await bench.record(name)
        assert record["prefill_node"] == "near"
        assert record["fallbacks"] == ["prefill_engine_died"]
        await is_back(bench, "far", engine)
        # Of its first engine's nothing is there but the arena, which is the agent's.
        assert {file for file in shared if file.exists()} == {
            file for file in shared if file.name.startswith("prfaas-")
        }
        status, told = await asked(bench, bench.system.api_url, path, body)
        assert answer_of(told) == answer_of(expected)
        await bench.wait_idle()

    bench.run(scenario(), timeout_s=BACK_S + 60)


def test_a_decode_server_that_dies_ends_its_streams_and_nothing_hangs(bench, alone):
    async def scenario():
        path, body = call(30, 600, max_tokens=400, ignore_eos=True, stream=True)
        engine = (await bench.describe("decode0")).engine_pid
        async with bench.session.post(bench.system.api_url + path, json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            os.kill(engine, signal.SIGKILL)
            began = time.monotonic()
            rest = await answer.text()
        assert time.monotonic() - began < SOON_S
        assert '"error"' in rest
        status, told = await asked(bench, bench.system.api_url, *call(SHORT, 601))
        assert (status, told["error"]["code"]) == (503, "no_decode_node")
        await is_back(bench, "decode0", engine)
        path, body = call(SHORT, 602)

        async def is_served() -> bool:
            return (await asked(bench, bench.system.api_url, path, body))[0] == 200

        await bench.wait_until(is_served)
        _, told = await asked(bench, bench.system.api_url, path, body)
        _, expected = await asked(bench, alone.url, path, body)
        assert answer_of(told) == answer_of(expected)
        await bench.wait_idle()

    bench.run(scenario(), timeout_s=BACK_S + 60)
