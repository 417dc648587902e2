"""Nodes join, leave and move while a gateway of two workers serves: real processes, engines without a model."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.byte_tokenizer import save_byte_tokenizer
from engine.emulated.emulated import emulated_tokens
from prfaas.cli import main
from prfaas.demo.client import complete

pytestmark = pytest.mark.long

PATIENCE_S = 120.0
SERVES_S = 60.0  # after its registration; less than a second on an idle machine
GATEWAY = """[gateway]
port = 0
workers = 2
tokenizer_dir = "tokenizer"
served_model = "tiny"

[gateway.membership]
file = "nodes.toml"
folder = "fleet"
"""
NODE = """[node]
node_id = "{name}"
cluster = "west"
cluster_kind = "pd"
role = "decode"
model = "llama"
served_model = "tiny"
engine = "emulated"
cache_bytes = 8388608
run_dir = "{run_dir}"
"""


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ends with its block, by itself or not."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, stdout=asyncio.subprocess.PIPE, env=os.environ | {"GRPC_VERBOSITY": "ERROR"}
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await running.communicate()
            except TimeoutError:
                running.kill()
        await running.communicate()


async def said(running: asyncio.subprocess.Process, pattern: str) -> str:
    """The first group of the first line that has it."""
    assert running.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := (await running.stdout.readline()).decode():
            if found := re.search(pattern, line):
                return found[1]
    raise AssertionError(f"it ended without {pattern}")


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110 it changes in another process
            await asyncio.sleep(0.02)


@asynccontextmanager
async def node(directory: Path, name: str, more: str = "") -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A decode node that is ready, and the address of its agent."""
    path = directory / f"{name}.toml"
    path.write_text(NODE.format(name=name, run_dir=directory / "run") + more)
    async with process("pd_cluster", "-c", str(path)) as running:
        agent = await said(running, r"node listening id=\S+ agent=(\S+)")
        await said(running, r"node (ready)")
        yield running, agent


@asynccontextmanager
async def forwarded(agent: str) -> AsyncIterator[str]:
    """Another address of the same agent."""
    host, _, port = agent.rpartition(":")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(1 << 16):
                writer.write(part)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@dataclass
class Site:
    """A gateway and what it says of its nodes."""

    url: str
    http: aiohttp.ClientSession
    directory: Path

    async def page(self, path: str) -> Any:
        async with self.http.get(f"{self.url}{path}") as answer:
            return await answer.json()

    async def metric(self, name: str, source: str = "file") -> float:
        async with self.http.get(f"{self.url}/metrics") as answer:
            found = re.search(rf'^{name}{{.*source="{source}".*}} (\S+)$', await answer.text(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def ready(self) -> dict[str, str]:
        """Agents by node, of nodes that are ready."""
        nodes = (await self.page("/prfaas/console"))["nodes"]
        return {each["node"]: each["agent"] for each in nodes if each["state"] == "ready"}

    async def are_ready(self, *names: str) -> None:
        """All workers see these nodes, and no others."""

        async def seen() -> bool:
            # Each connection goes to any of the workers; enough of them go to all.
            return all([set(await self.ready()) == set(names) for _ in range(8)])

        await until(seen)

    async def answers(self, count: int, seed: int, tokens: int = 24) -> None:
        """So many requests at once, each answered with the right tokens."""

        async def one(number: int) -> None:
            prompt = [4 + (seed * 53 + number * 37 + at) % 500 for at in range(64)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            done = await complete(self.http, self.url, body, f"{seed}-{number}")
            assert done.token_ids == emulated_tokens(prompt, tokens)

        await asyncio.gather(*(one(number) for number in range(count)))

    def listed(self, *nodes: tuple[str, str]) -> None:
        """The watched file lists these nodes from now on."""
        hidden = self.directory / ".nodes"
        hidden.write_text("".join(f'[[nodes]]\nid = "{name}"\nagent = "{agent}"\n' for name, agent in nodes))
        hidden.rename(self.directory / "nodes.toml")


@asynccontextmanager
async def site(directory: Path, file: str = GATEWAY) -> AsyncIterator[Site]:
    (directory / "gateway.toml").write_text(file)
    (directory / "tokenizer").mkdir()
    save_byte_tokenizer(directory / "tokenizer", 4096)
    (directory / "fleet").mkdir()
    async with (
        process("prfaas", "gateway", "-c", str(directory / "gateway.toml")) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http,
    ):
        yield Site(await said(running, r"gateway ready url=(\S+)"), http, directory)


def nodes_command(directory: Path, *words: str) -> int:
    return main(["nodes", *words, "-c", str(directory / "gateway.toml")])


def test_a_fleet_changes_while_it_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as held:
            _, first = await held.enter_async_context(node(tmp_path, "d0"))
            _, second = await held.enter_async_context(node(tmp_path, "d1"))
            (tmp_path / "nodes.toml").write_text(f'[[nodes]]\nid = "d0"\nagent = "{first}"\n')
            here = await held.enter_async_context(site(tmp_path))
            await here.are_ready("d0")
            await here.answers(4, seed=1)

            assert nodes_command(tmp_path, "add", "d1", second) == 0
            began = time.monotonic()
            await here.are_ready("d0", "d1")
            took_s = time.monotonic() - began
            print(f"serves after {took_s:.2f} s")
            assert took_s < SERVES_S

            under_way = await requests_on(here, "d1")
            assert nodes_command(tmp_path, "remove", "d1") == 0
            await here.are_ready("d0")
            await here.answers(4, seed=3)
            await under_way

            again = await held.enter_async_context(forwarded(first))
            under_way = asyncio.create_task(here.answers(16, seed=4, tokens=400))
            here.listed(("d0", again))
            await until(lambda: is_at(here, "d0", again))
            await here.answers(4, seed=5)
            await under_way

            here.directory.joinpath("nodes.toml").write_text("[[nodes")
            await until(lambda: here.metric("prfaas_membership_frozen_seconds"))
            await here.answers(4, seed=6)
            async with process("prfaas", "check", "-c", str(tmp_path / "gateway.toml")) as check:
                assert "not valid TOML" in await said(check, r"(.*nodes\.toml.*)")
                assert await check.wait() == 1
            here.listed(("d0", again))
            await until(lambda: is_fresh(here))

            async with node(tmp_path, "d2", f'registry = "{tmp_path}/fleet"\n') as (third, _):
                await here.are_ready("d0", "d2")
                third.send_signal(signal.SIGTERM)
                await here.answers(8, seed=7)
                await here.are_ready("d0")
                assert await third.wait() == 0
            assert list((tmp_path / "fleet").iterdir()) == []

    async def requests_on(here: Site, name: str) -> asyncio.Task[None]:
        """Some that run on this node. Where a busy machine looks too late, others are sent."""
        for seed in count(100):
            under_way = asyncio.create_task(here.answers(16, seed, tokens=400))
            while not under_way.done():
                if any(
                    each["node"] == name and each["running"] for each in (await here.page("/prfaas/console"))["nodes"]
                ):
                    return under_way
            await under_way
        raise AssertionError

    async def is_at(here: Site, name: str, agent: str) -> bool:
        return all([(await here.ready()).get(name) == agent for _ in range(8)])

    async def is_fresh(here: Site) -> bool:
        return not await here.metric("prfaas_membership_frozen_seconds")

    asyncio.run(scenario())


def test_nodes_lists_what_a_gateway_would_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gateway.toml").write_text(GATEWAY)
    assert nodes_command(tmp_path, "list", "--json") == 1  # neither the file nor the folder is there
    assert len(json.loads(capsys.readouterr().out)["failures"]) == 2
    (tmp_path / "fleet").mkdir()
    assert nodes_command(tmp_path, "add", "d0", "127.0.0.1:7001", "--role", "decode", "--label", "rack=b4") == 0
    assert "nodes.toml: d0 is listed at 127.0.0.1:7001" in capsys.readouterr().out
    assert nodes_command(tmp_path, "list", "--json") == 0
    node = {"id": "d0", "agent": "127.0.0.1:7001", "role": "decode", "labels": {"rack": "b4"}, "source": "file"}
    assert json.loads(capsys.readouterr().out)["nodes"] == [node]
    assert nodes_command(tmp_path, "list") == 0
    assert "127.0.0.1:7001" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("add", "d1", "127.0.0.1"), "must be host:port"),
        (("add", "d0", "127.0.0.1:7002"), "d0 at 127.0.0.1:7001 is listed already"),
        (("add", "d1", "127.0.0.1:7001"), "d0 at 127.0.0.1:7001 is listed already"),
        (("add", "d1", "192.0.2.7:7001"), "would be in clear"),
        (("remove", "d7"), "has no d7; it lists d0"),
        (("remove", "d0"), "is the last node"),
    ],
)
def test_nodes_refuses_nonsense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    (tmp_path / "gateway.toml").write_text(GATEWAY)
    assert nodes_command(tmp_path, "add", "d0", "127.0.0.1:7001") == 0
    before = (tmp_path / "nodes.toml").read_text()
    assert nodes_command(tmp_path, *words) == 2
    assert why in capsys.readouterr().err
    assert (tmp_path / "nodes.toml").read_text() == before


def test_a_gateway_that_watches_no_file_says_how_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gateway.toml").write_text('[gateway]\ntokenizer_dir = "x"\nnodes = [{ agent = "127.0.0.1:7001" }]\n')
    assert nodes_command(tmp_path, "add", "d0", "127.0.0.1:7002") == 2
    assert "watches no file of members: add [gateway.membership]" in capsys.readouterr().err
    assert nodes_command(tmp_path, "add", "d0", "127.0.0.1:7002", "--file", str(tmp_path / "nodes.toml")) == 0
