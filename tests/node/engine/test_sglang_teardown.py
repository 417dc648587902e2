import asyncio
import subprocess
import sys

import pytest

from node.engine.sglang_teardown import end_headless


class Server:
    """A server that is killed by a note."""

    def __init__(self) -> None:
        self.pid: int | None = 7
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


@pytest.fixture
def ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def look(server: Server, scheduler: int, *, joins: bool = False) -> bool:
    asyncio.run(end_headless(server, scheduler, lambda: joins))
    return server.is_killed


def test_a_server_whose_scheduler_has_ended_is_killed(ended: int) -> None:
    assert look(Server(), ended)


def test_one_that_has_ended_unasked_is_as_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        assert look(Server(), zombie.pid)


def test_who_calls_again_lives(ended: int) -> None:
    assert not look(Server(), ended, joins=True)


def test_its_successor_is_left_alone() -> None:
    server = Server()

    async def scenario(scheduler: int) -> None:
        looking = asyncio.create_task(end_headless(server, scheduler, lambda: False))
        await asyncio.sleep(0)
        server.pid = 8
        await looking

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        asyncio.run(scenario(running.pid))
    assert not server.is_killed
