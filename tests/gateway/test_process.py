"""The gateway as a process of its own: its first line, its signals, its exit."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.scripted import Topology, topology
from tests.gateway.worlds import PATIENCE_S, on_loop
from tests.prompts.builders import TEMPLATE, bpe

pytestmark = pytest.mark.turns

LONG = "the quick brown fox jumps over the lazy dog " * 40


def write_config(directory: Path, nodes: Topology, more: str = "") -> Path:
    bpe().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
    agents = "".join(f'[[gateway.nodes]]\nagent = "{node.agent_address}"\n' for node in nodes.nodes)
    path = directory / "gateway.toml"
    path.write_text(f'[gateway]\nport = 0\ntokenizer_dir = "."\nthreshold_tokens = 100\n{more}{agents}')
    return path


@asynccontextmanager
async def process(
    directory: Path, nodes: Topology, more: str = ""
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway process that has said where it listens."""
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        "-c",
        str(write_config(directory, nodes, more)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"GRPC_VERBOSITY": "ERROR"},
    )
    assert running.stdout is not None
    try:
        line = (await running.stdout.readline()).decode().strip()
        assert line.startswith("gateway ready url=http://127.0.0.1:")
        yield running, line.partition("url=")[2]
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
        running.stdout.feed_eof()
        await asyncio.sleep(0)


async def until_ready(http: aiohttp.ClientSession) -> None:
    await _until_health(http, is_ready=True)


async def until_draining(http: aiohttp.ClientSession) -> None:
    await _until_health(http, is_ready=False)


async def _until_health(http: aiohttp.ClientSession, is_ready: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await _is_ready(http) != is_ready:  # noqa: ASYNC110 it changes in another process
            await asyncio.sleep(0.01)


async def _is_ready(http: aiohttp.ClientSession) -> bool:
    async with http.get("/health") as response:
        return response.status == 200 and (await response.json())["nodes_ready"] == 3


@on_loop
async def test_sigterm_lets_streams_finish_refuses_new_ones_and_ends_the_process(tmp_path: Path) -> None:
    async with topology(decode=1) as nodes, process(tmp_path, nodes) as (running, url):
        async with aiohttp.ClientSession(url) as http:
            await until_ready(http)
            go_on = nodes.decode[0].script.word_gate = asyncio.Event()
            body = {"model": "scripted", "prompt": LONG, "stream": True}
            async with http.post("/v1/completions", json=body) as stream:
                assert stream.status == 200
                running.send_signal(signal.SIGTERM)
                await until_draining(http)
                async with http.post("/v1/completions", json=body) as refused:
                    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                go_on.set()
                assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await running.wait() == 0  # draining may last ten times as long
        assert not nodes.leftovers()


@on_loop
async def test_a_second_signal_ends_streams_too(tmp_path: Path) -> None:
    async with (
        topology(decode=1) as nodes,
        process(tmp_path, nodes) as (running, url),
        aiohttp.ClientSession(url) as http,
    ):
        await until_ready(http)
        nodes.decode[0].script.word_interval_s = 2 * PATIENCE_S
        body = {"model": "scripted", "prompt": LONG, "stream": True}
        async with http.post("/v1/completions", json=body) as stream:
            assert stream.status == 200
            running.send_signal(signal.SIGTERM)
            await until_draining(http)
            running.send_signal(signal.SIGINT)
            async with asyncio.timeout(PATIENCE_S):
                assert await running.wait() == 0


def test_sighup_does_not_end_a_gateway_that_is_starting(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    os.mkfifo(path)
    with subprocess.Popen([sys.executable, "-m", "gateway", "-c", str(path)], stderr=subprocess.PIPE) as starting:
        with path.open("w") as file:  # it is open when the gateway reads its configuration
            starting.send_signal(signal.SIGHUP)
            file.write("no = TOML =")
        _, error = starting.communicate()
    assert (starting.returncode, b"gateway.toml" in error) == (2, True)


@on_loop
async def test_sigterm_ends_workers_that_are_starting_before_they_serve(tmp_path: Path) -> None:
    async with topology(decode=1) as nodes:
        path = write_config(tmp_path, nodes, 'workers = 2\nlog_level = "info"\n')
        # No node answers, so a worker waits for one before it listens.
        text = path.read_text()
        for number, node in enumerate(nodes.nodes, start=1):
            text = text.replace(f'"{node.agent_address}"', f'"127.0.0.1:{number}"')
        path.write_text(text)
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "-c", str(path), stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(PATIENCE_S):
            while not any(map(_catches_sigterm, _children(running.pid))):  # noqa: ASYNC110 in other processes
                await asyncio.sleep(0.001)
        running.send_signal(signal.SIGTERM)
        _, error = await running.communicate()
    assert running.returncode == 0
    assert b"stopping" not in error or b"serves, pid=" in error  # or we came too late
    assert b"Traceback" not in error


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def _catches_sigterm(pid: int) -> bool:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigCgt"], 16) & 1 << signal.SIGTERM - 1)


@on_loop
async def test_a_port_that_is_taken_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    async with topology(decode=1) as nodes:
        path = write_config(tmp_path, nodes)
        port = nodes.nodes[0].engine_url.rpartition(":")[2]
        path.write_text(path.read_text().replace("port = 0", f"port = {port}"))
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "-c", str(path), stderr=asyncio.subprocess.PIPE
        )
        _, error = await running.communicate()
        assert running.returncode == 2
        assert f"gateway: cannot listen on 127.0.0.1:{port}: Address already in use; choose another".encode() in error
        assert error.count(b"listen") == 1
        assert b"Traceback" not in error
