"""A port of a predecessor is waited for, a stranger's is refused."""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.errors import NodeConfigError, PortHeld
from node.process.ports import NODE_VARIABLE, ListenPort, holder, is_predecessor, wait_free

LISTENER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
ENGINE = """
import mmap, threading
memory = mmap.mmap(-1, 1 << 29)
memory.write(bytes(len(memory)))
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@contextmanager
def listener(before: str = "", **environment: str) -> Iterator[tuple[subprocess.Popen[str], ListenPort]]:
    command = [sys.executable, "-c", before + LISTENER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        yield process, ListenPort("engine_port", "127.0.0.1", int(process.stdout.readline()))
        process.kill()


def test_it_is_known_who_has_a_port() -> None:
    with listener(**{NODE_VARIABLE: "n0"}) as (process, port):
        assert holder(port.number) == process.pid
        assert (is_predecessor(process.pid, "n0"), is_predecessor(process.pid, "n1")) == (True, False)
        assert not is_predecessor(os.getpid(), "n0")
    assert holder(port.number) is None


def test_a_strangers_port_is_refused_at_once() -> None:
    async def never() -> None:
        with listener() as (_, port):
            await wait_free(port, "n0", 3600.0, lambda: 0.0)

    with pytest.raises(
        NodeConfigError, match=r"engine_port = \d+: cannot listen on 127\.0\.0\.1:\d+: Address already in use"
    ):
        asyncio.run(never())


def test_a_predecessors_port_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with listener(**{NODE_VARIABLE: "n0"}) as (process, port):
            waiting = asyncio.create_task(wait_free(port, "n0", 3600.0, lambda: 0.0))
            while "waiting for pid" not in caplog.text:  # noqa: ASYNC110 the log has no Event
                await asyncio.sleep(0.001)
            assert not waiting.done()
            process.kill()
            await waiting

    asyncio.run(scenario())


def test_a_predecessor_that_is_killed_lets_go_of_its_memory_before_its_port() -> None:
    """As an engine's: its command line and environment are gone with its memory, and its first thread before the others."""
    with listener(ENGINE, **{NODE_VARIABLE: "n0"}) as (process, port):
        process.kill()
        asyncio.run(wait_free(port, "n0", 3600.0, lambda: 0.0))


def test_but_not_for_ever() -> None:
    hours = itertools.count(step=3600.0)

    async def scenario() -> None:
        with listener(**{NODE_VARIABLE: "n0"}) as (_, port):
            await wait_free(port, "n0", 60.0, lambda: float(next(hours)))

    with pytest.raises(PortHeld, match=r"engine_port = \d+: pid \d+, of this node's earlier run"):
        asyncio.run(scenario())


def test_any_free_port_is_free() -> None:
    asyncio.run(wait_free(ListenPort("control_port", "127.0.0.1", 0), "n0", 0.0, lambda: 0.0))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number = probe.getsockname()[1]
    asyncio.run(wait_free(ListenPort("control_port", "127.0.0.1", number), "n0", 0.0, lambda: 0.0))


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_an_address_of_ipv6_is_free_or_taken_as_any_other() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        number = listener.getsockname()[1]
        with pytest.raises(NodeConfigError, match=rf"\[::1\]:{number}"):
            asyncio.run(wait_free(ListenPort("control_port", "::1", number), "n", 0.0, time.monotonic))
    asyncio.run(wait_free(ListenPort("control_port", "::1", number), "n", 0.0, time.monotonic))
