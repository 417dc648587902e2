"""A fleet goes to another layout and back while a gateway serves: real processes, engines without a model."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from engine.emulated.emulated import emulated_tokens
from prfaas.demo.client import complete
from tests.prfaas.system.test_membership import PATIENCE_S, Site, process, said, site, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # it starts nodes twelve times, beside others

OLD, NEW = 16, 32  # tokens of a block
AT_ONCE = 4
TOKENS = 16
GATEWAY = """[gateway]
port = 0
tokenizer_dir = "tokenizer"
served_model = "tiny"
threshold_tokens = 32

[gateway.membership]
folder = "fleet"
"""
NODE = """[node]
node_id = "{name}"
cluster = "{cluster}"
cluster_kind = "{kind}"
role = "{role}"
model = "llama"
served_model = "tiny"
engine = "emulated"
block_size = {block_size}
cache_bytes = 8388608
registry = "{directory}/fleet"
run_dir = "{directory}/run"
"""


@asynccontextmanager
async def node(directory: Path, name: str, block_size: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A node that is ready, with blocks of that size: d… decode at home, p… prefill in the remote cluster."""
    is_decode = name.startswith("d")
    cluster, kind, role = ("west", "pd", "decode") if is_decode else ("east", "prfaas", "prefill")
    path = directory / f"{name}.toml"
    path.write_text(
        NODE.format(name=name, cluster=cluster, kind=kind, role=role, block_size=block_size, directory=directory)
    )
    async with process("pd_cluster" if is_decode else "prfaas_cluster", "-c", str(path)) as running:
        await said(running, r"node (ready)")
        yield running


@dataclass
class Fleet:
    """Nodes by name, each put in the place of the one before."""

    site: Site
    held: dict[str, AsyncExitStack] = field(default_factory=dict)
    running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    async def put(self, name: str, block_size: int) -> None:
        """Has this node run with blocks of that size: what ran before drains and ends."""
        if (before := self.held.pop(name, None)) is not None:
            self.running[name].send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                assert await self.running[name].wait() == 0
            await before.aclose()
        self.held[name] = held = AsyncExitStack()
        self.running[name] = await held.enter_async_context(node(self.site.directory, name, block_size))

        async def is_seen() -> bool:
            return name in await self.site.ready()

        await until(is_seen)

    async def end(self) -> None:
        for held in self.held.values():
            await held.aclose()


@dataclass
class Load:
    """Requests one after the other, at several clients; `done` of them were right."""

    site: Site
    done: int = 0
    stopped: bool = False
    numbers: "count[int]" = field(default_factory=count)

    async def client(self) -> None:
        while not self.stopped:
            number = next(self.numbers)
            prompt = [4 + (number * 37 + at) % 500 for at in range(100)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            done = await complete(self.site.http, self.site.url, body, f"r{number}")
            assert done.token_ids == emulated_tokens(prompt, TOKENS)
            self.done += 1

    async def more(self, number: int = 20) -> None:
        """Waits for so many answers more."""
        due = self.done + number

        async def has_come() -> bool:
            return self.done >= due

        await until(has_come)


def test_a_fleet_rolls_to_another_layout_with_a_rollback_in_the_middle(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with site(tmp_path, GATEWAY) as here:
            fleet, load = Fleet(here), Load(here)
            try:
                for name in ("d0", "d1", "p0", "p1"):
                    await fleet.put(name, OLD)
                async with asyncio.TaskGroup() as clients:  # the first one that fails ends all
                    for _ in range(AT_ONCE):
                        clients.create_task(load.client())
                    await load.more()
                    await fleet.put("p0", NEW)
                    await load.more()  # no decode node of its revision: nothing goes there
                    old, new = await revision(here, "p1"), await revision(here, "p0")
                    assert old != new
                    assert await answered(here) == {old}
                    await fleet.put("d0", NEW)
                    await until(lambda: have_answered(here, {old, new}))
                    for name in ("d0", "p0"):  # back
                        await fleet.put(name, OLD)
                        await load.more()
                    for name in ("p0", "d0", "p1", "d1"):
                        await fleet.put(name, NEW)
                        await load.more()
                    load.stopped = True
            finally:
                await fleet.end()
            async with here.http.get(f"{here.url}/prfaas/requests") as answer:
                records = [json.loads(line) for line in (await answer.text()).splitlines()]
            assert {record["status"] for record in records} == {200}
            assert {(record["route"], record["revision"]) for record in records[-10:]} == {("remote", new)}

    async def revision(here: Site, name: str) -> str:
        nodes = (await here.page("/prfaas/console"))["nodes"]
        return next(str(each["revision"]) for each in nodes if each["node"] == name)

    async def have_answered(here: Site, revisions: set[str]) -> bool:
        return await answered(here) == revisions

    async def answered(here: Site) -> set[str]:
        """The revisions that have answered something."""
        async with here.http.get(f"{here.url}/metrics") as answer:
            page = await answer.text()
        return set(re.findall(r'^prfaas_revision_requests_total\{revision="(\w+)",status="200"\} ', page, re.MULTILINE))

    asyncio.run(scenario())
