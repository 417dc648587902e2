"""Children start without fork, and end with their parent."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from node.process.children import Child, command_of, ending_with_us, kill_group
from tests.node.running import new_runner

STARTS = 200
AT_ONCE = 4


class _Ticks(grpc.GenericRpcHandler):
    """Says something every few milliseconds, whatever is called: the server's threads are never idle."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def ticks(request: bytes, context: Any) -> AsyncIterator[bytes]:
            while True:
                yield b"tick"
                await asyncio.sleep(0.005)

        return grpc.unary_stream_rpc_method_handler(ticks)


@contextlib.asynccontextmanager
async def watched_server() -> AsyncIterator[None]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Ticks(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = channel.unary_stream("/any/call")(b"")
        await watch.read()
        yield
        watch.cancel()
    await server.stop(None)


def child(*command: str, orphaned_by: signal.Signals = signal.SIGKILL) -> Child:
    with open(os.devnull, "ab") as nothing:
        return Child(command, output=nothing, environment=os.environ, orphaned_by=orphaned_by)


def test_no_child_dies_on_its_way_to_exec() -> None:
    async def scenario() -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def start() -> int:
            async with slots:
                return await child("/bin/true").wait()

        async with watched_server():
            assert await asyncio.gather(*(start() for _ in range(STARTS))) == [0] * STARTS

    with new_runner() as runner:
        runner.run(scenario())


def test_how_a_child_ended_is_known_to_everyone_who_waits() -> None:
    async def scenario() -> None:
        ended = child("/bin/sh", "-c", "exit 3")
        assert await asyncio.gather(ended.wait(), ended.wait()) == [3, 3]
        assert (await ended.wait(), ended.returncode) == (3, 3)
        killed = child("/bin/sleep", "100")
        assert killed.returncode is None
        killed.terminate()
        assert await killed.wait() == -signal.SIGTERM
        assert await child("/no/such/program").wait() == 127

    with new_runner() as runner:
        runner.run(scenario())


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_is_awaited_without_a_descriptor_for_that() -> None:
    async def scenario() -> None:
        waited_for = child("sleep", "60")
        with no_descriptor_left():
            with pytest.raises(OSError, match="Too many open files"):
                os.pidfd_open(waited_for.pid)
            waiting = asyncio.create_task(waited_for.wait())
            await asyncio.sleep(0)
        assert not waiting.done(), "whoever hears that it has ended starts another one beside it"
        waited_for.terminate()
        assert await waiting == -signal.SIGTERM

    with new_runner() as runner:
        runner.run(scenario())


def test_a_child_can_be_told_to_end_by_a_parent_that_cannot() -> None:
    async def scenario() -> None:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            told = child("/bin/sh", "-c", "kill -TERM $$; exit 3")
            assert await told.wait() == -signal.SIGTERM
        finally:
            signal.signal(signal.SIGTERM, before)

    with new_runner() as runner:
        runner.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_a_parent_that_is_killed(number: signal.Signals) -> None:
    # The parent hands its end of a pipe to its child and waits for ever: end of file comes when both are gone.
    starter = (
        "import signal, subprocess, sys, time\n"
        "from node.process.children import ending_with_us\n"
        f"child = subprocess.Popen(ending_with_us(['/bin/sleep', '1000'], signal.Signals({int(number)})))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.kill()
        assert parent.stdout.read() == ""


def test_a_child_whose_parent_died_first_does_not_begin() -> None:
    command = ending_with_us(["/bin/echo", "too late"], signal.SIGTERM)
    command[command.index(str(os.getpid()))] = "1"  # as if another process had adopted it
    late = subprocess.run(command, capture_output=True, check=False)
    assert (late.returncode, late.stdout) == (128 + signal.SIGTERM, b"")


def test_a_child_that_is_just_becoming_a_program_is_known_by_it() -> None:
    """Right after vfork its command line is empty more often than not."""
    for _ in range(100):
        child = util.spawnv_passfds(b"/bin/sleep", [b"/bin/sleep", b"1000"], ())  # as the resource tracker is started
        try:
            assert command_of(Path("/proc") / str(child), lambda: 0.0) == b"/bin/sleep\x001000\x00"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_child_that_is_just_ending_is_not_waited_for(tmp_path: Path) -> None:
    """One that gives gigabytes back has no command line for a second or more before it is a zombie."""
    (tmp_path / "cmdline").write_bytes(b"")
    (tmp_path / "status").write_text("Name:\tvllm\nState:\tR (running)\nTgid:\t7\nThreads:\t1\n")
    assert command_of(tmp_path, lambda: 0.0) == b"", "it would wait for ever, as time stands still"


def test_what_tidies_up_after_killed_children_is_spared() -> None:
    program = (
        "import time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "print(SharedMemory(create=True, size=64).name, flush=True)\ntime.sleep(1000)"
    )
    reading, writing = os.pipe()
    with os.fdopen(reading) as said, os.fdopen(writing, "wb") as out:
        started = Child([sys.executable, "-c", program], output=out, environment=os.environ, orphaned_by=signal.SIGKILL)
        name = said.readline().strip()
        assert (Path("/dev/shm") / name).exists()
        kill_group(started.pid)
        asyncio.run(started.wait())
    deadline = time.monotonic() + 60
    while (Path("/dev/shm") / name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
