"""Two vLLM engines from one node's file, behind a gateway: `--ranks 2`, each with a server, and vLLM's own way, one server.

Rank 0 prefills and rank 1 decodes, after a change of roles. They are started once (and once more when one is killed).
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc.aio
import numpy as np
import pytest

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.served_model import salt_of
from hybrid_cache.cache.events import BlocksStored, Medium
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import ModelLayout
from prfaas.demo.client import complete
from tests.vllm.cases import CASES, Case, build
from tests.vllm.conftest import Fleet
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400), pytest.mark.dimensions(start="ranks of one file")]

PATIENCE_S = 900.0  # two servers start at once, and their engines wait for each other
BODY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
NODE = """[node]
node_id = "moe"
cluster = "west"
cluster_kind = "pd"
role = "decode"
model = "{model}"
served_model = "tiny"
engine = "vllm"
engine_args = ["--dtype", "float32", "--num-gpu-blocks-override", "512", "--data-parallel-size", "2"]
chunk_tokens = 256
max_model_len = 4096
cache_bytes = 134217728
run_dir = "run"
registry = "fleet"
drain_timeout_s = 300.0
"""
GATEWAY = """[gateway]
port = 0
tokenizer_dir = "{model}"
served_model = "tiny"

[gateway.membership]
folder = "fleet"
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """How two engines are started; `arch` is their model."""

    arch: str
    flags: tuple[str, ...]
    one_server: bool

    @property
    def case(self) -> Case:
        return next(case for case in CASES if case.arch == self.arch)


KINDS: Final = {
    "servers": Kind("gpt_oss", ("--ranks", "2"), one_server=False),
    "one server": Kind("gpt_oss", (), one_server=True),
    "one server of a dense model": Kind("llama", (), one_server=True),
}


class Ranks:
    """Both processes, what they have said, and a client."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder = folder
        self.kind = kind
        self._runner = asyncio.Runner()
        self.agents: dict[int, str] = {}
        self._metrics: dict[int, str] = {}
        self.nodes: asyncio.subprocess.Process
        self._gateway: asyncio.subprocess.Process
        self.session: aiohttp.ClientSession
        self.url = ""

    def run(self, scenario: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                return await scenario

        return self._runner.run(bounded())

    async def start(self) -> None:
        (self._folder / "fleet").mkdir()
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S))
        self.nodes = await self.begun("prfaas", "node", "-c", "node.toml", *self.kind.flags)
        ready = 0
        async for line in self._lines(self.nodes):
            if found := re.search(r"node listening id=moe-(\d) agent=(\S+) metrics=(\S+)", line):
                self.agents[int(found[1])], self._metrics[int(found[1])] = found[2], found[3]
            ready += line.startswith("node ready")
            if ready == 2:
                break
        self._gateway = await self.begun("prfaas", "gateway", "-c", "gateway.toml")
        async for line in self._lines(self._gateway):
            if found := re.search(r"(http://\S+)", line):
                self.url = found[1]
                break

    async def begun(self, *command: str) -> asyncio.subprocess.Process:
        """A command of ours, in the folder of the files."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GRPC_VERBOSITY": "ERROR"}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command, cwd=self._folder, stdout=asyncio.subprocess.PIPE, env=environment
        )

    async def _lines(self, process: asyncio.subprocess.Process) -> Any:
        assert process.stdout is not None
        while line := (await process.stdout.readline()).decode():
            print(line, end="")
            yield line

    async def described(self, rank: int) -> pb.NodeDescription:
        async with grpc.aio.insecure_channel(self.agents[rank]) as channel:
            stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
            description: pb.NodeDescription = await stub.Describe(pb.DescribeRequest(), timeout=60.0)
            return description

    async def serving(self) -> list[pb.NodeDescription]:
        """Both, once both serve."""
        while True:
            with suppress(grpc.aio.AioRpcError):
                found = [await self.described(rank) for rank in range(2)]
                if all(each.state == pb.NODE_STATE_READY for each in found):
                    return found
            await asyncio.sleep(0.5)

    async def tokens(self, prompt: list[int], name: str) -> list[int]:
        """What the gateway answers, once it has both nodes for it."""
        while await self._roles() != {"moe-0": "prefill", "moe-1": "decode"}:  # noqa: ASYNC110 of other processes
            await asyncio.sleep(0.2)
        body = BODY | {"prompt": prompt, "max_tokens": 16}
        return (await complete(self.session, self.url, body, name)).token_ids

    async def _roles(self) -> dict[str, str]:
        """Of the nodes that are ready, as the gateway sees them."""
        async with self.session.get(f"{self.url}/prfaas/console") as answer:
            nodes = (await answer.json())["nodes"]
        return {each["node"]: each["role"] for each in nodes if each["state"] == "ready"}

    async def begun_answer(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """A stream of the gateway's that has begun."""
        answer = await self.session.post(f"{self.url}/v1/completions", json=body)
        assert await answer.content.readline()
        return answer

    async def record(self, name: str) -> dict[str, Any]:
        while True:
            async with self.session.get(f"{self.url}/prfaas/requests", params={"id": name}) as answer:
                for line in (await answer.text()).splitlines():
                    if f'"{name}"' in line:
                        return dict(json.loads(line))
            await asyncio.sleep(0.1)

    async def computed(self) -> dict[str, float]:
        """Prompt tokens by the data parallel rank whose engine has computed them, as the servers say."""
        totals: dict[str, float] = {}
        for url in {each.engine_url for each in await self.serving()}:
            async with self.session.get(f"{url}/metrics") as answer:
                text = await answer.text()
            for engine, value in re.findall(r'^vllm:prompt_tokens_total\{engine="(\d+)".* (\S+)$', text, re.M):
                totals[engine] = max(totals.get(engine, 0.0), float(value))  # one server says it at each port
        return totals

    async def restarts(self) -> list[float]:
        """Of each node's engine."""
        counts = []
        for _, url in sorted(self._metrics.items()):
            async with self.session.get(f"{url}/metrics") as answer:
                found = re.search(r"^prfaas_engine_restarts_total(?:\{.*\})? (\S+)$", await answer.text(), re.M)
            assert found is not None
            counts.append(float(found[1]))
        return counts

    async def heard(self, rank: int, wanted: list[bytes]) -> None:
        """Waits until a node has told that its engine holds blocks."""
        agent, known = AgentClient(self.agents[rank], 5.0), set[bytes]()
        try:
            async with aclosing(agent.watch(0.25, 10.0)) as events:
                async for event in events:
                    if isinstance(event, BlocksStored) and event.medium is Medium.ENGINE and event.group == 0:
                        known.update(event.hashes)
                    if known.issuperset(wanted):
                        return
        finally:
            await agent.close()

    async def close(self) -> None:
        await self.session.close()
        for process in (self._gateway, self.nodes):
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(120.0):
                        await process.communicate()
            if process.returncode is None:
                process.kill()

    def end(self) -> None:
        self.run(self.close())
        self._runner.close()


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    kind = KINDS[request.param]
    folder, model = tmp_path_factory.mktemp("ranks"), build(kind.arch, models)
    (folder / "node.toml").write_text(NODE.format(model=model))
    (folder / "gateway.toml").write_text(GATEWAY.format(model=model))
    running = Ranks(folder, kind)
    try:
        running.run(running.start())
        yield running
    finally:
        running.end()


def prompt(seed: int, num_tokens: int = 700) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(4, 256, num_tokens)]


def test_tokens_are_those_of_a_plain_server(ranks: Ranks, fleet: Fleet) -> None:
    async def scenario() -> None:
        convert = await ranks.begun(
            "prfaas", "convert", "moe-0", "--to", "prefill", "-c", "gateway.toml", "--force", "--verify-timeout", "300"
        )
        assert await convert.wait() == 0
        plain = fleet.reference(ranks.kind.case)
        await asyncio.to_thread(plain.wait_ready)
        for seed in range(3):
            expected = plain.submit(f"plain-{seed}", prompt(seed), 16)
            assert await ranks.tokens(prompt(seed), f"seen-{seed}") == (await asyncio.wrap_future(expected)).tokens
        record = await ranks.record("seen-2")
        assert (record["prefill_node"], record["decode_node"], record["fallbacks"]) == ("moe-0", "moe-1", [])

    ranks.run(scenario())


def test_each_rank_computes_what_comes_to_its_port(ranks: Ranks) -> None:
    """Whatever a client says: a gateway has chosen. Its node hears of the blocks."""

    async def scenario() -> None:
        nodes = await ranks.serving()
        assert len({each.engine_url for each in nodes}) == 2
        assert len({parent_of(each.engine_pid) for each in nodes}) == (1 if ranks.kind.one_server else 2)
        for rank, of_client in ((1, "0"), (0, "1"), (1, "7"), (1, None)):
            asked, before = prompt(20 + rank + 2 * len(of_client or "")), await ranks.computed()
            headers = {} if of_client is None or not ranks.kind.one_server else {"X-data-parallel-rank": of_client}
            url = nodes[rank].engine_url
            await complete(ranks.session, url, BODY | {"prompt": asked, "max_tokens": 4}, "straight", headers)
            after = await ranks.computed()
            assert {engine for engine in after if after[engine] > before[engine]} == {str(rank)}
        layout = ModelLayout.from_json(nodes[1].layout_json)
        await ranks.heard(1, block_hashes(asked[:-1], layout.block_size, salt_of(layout)))

    ranks.run(scenario())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_an_engine_that_is_stopped_is_silent_at_its_own_node_alone(ranks: Ranks) -> None:
    """The process that rank 0's node has started may have those of all ranks below it."""

    async def scenario() -> None:
        engines = [each.engine_pid for each in await ranks.serving()]
        for rank in (1, 0):
            os.kill(engines[rank], signal.SIGSTOP)
            try:
                while (await ranks.described(rank)).state != pb.NODE_STATE_ENGINE_SILENT:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                await asyncio.sleep(3.0)  # the other node looks each second, twice
                assert (await ranks.described(1 - rank)).state == pb.NODE_STATE_READY
            finally:
                os.kill(engines[rank], signal.SIGCONT)
            await ranks.serving()

    ranks.run(scenario())


def test_the_group_starts_anew_when_an_engine_dies(ranks: Ranks, fleet: Fleet) -> None:
    """The other engine could not go on, nor could the new one join it. Both nodes keep what they hold, and get back what was
    lent."""

    async def scenario() -> None:
        before, known = await ranks.serving(), prompt(8)
        await ranks.tokens(known, "kept")
        body = BODY | {"max_tokens": 300, "stream": True}
        async with asyncio.TaskGroup() as asking:
            answers = [asking.create_task(ranks.begun_answer(body | {"prompt": prompt(30 + at)})) for at in range(3)]
        os.kill(before[1].engine_pid, signal.SIGKILL)
        for answer in answers:
            answer.result().close()
        after = await ranks.serving()
        while {each.engine_pid for each in before} & {each.engine_pid for each in after}:
            await asyncio.sleep(0.5)
            after = await ranks.serving()
        assert [each.boot_id for each in after] == [each.boot_id for each in before]
        if ranks.kind.one_server:
            assert await ranks.restarts() == [1.0, 1.0]
        assert after[0].pool.pages_prefix > 0
        while any(each.pool.pages_locked or each.pool.pages_transfer for each in after):
            await asyncio.sleep(0.2)
            after = await ranks.serving()
        expected = fleet.reference(ranks.kind.case).submit("plain-anew", prompt(7), 16)
        assert await ranks.tokens(prompt(7), "anew") == (await asyncio.wrap_future(expected)).tokens

    ranks.run(scenario())


def test_no_rank_ends_its_engine_before_all_have_answered(ranks: Ranks) -> None:
    """Its last one: the nodes have ended."""

    async def scenario() -> None:
        about = await ranks.described(1)
        body = BODY | {"prompt": prompt(9, 40), "max_tokens": 40, "stream": True}
        async with ranks.session.post(f"{about.engine_url}/v1/completions", json=body) as answer:
            lines = aiter(answer.content)
            assert await anext(lines)
            ranks.nodes.send_signal(signal.SIGTERM)
            said = [line async for line in lines if line.strip()]
        assert said[-1].strip() == b"data: [DONE]"
        assert not [line for line in said if b'"error"' in line]
        assert await ranks.nodes.wait() == 0

    ranks.run(scenario())
