"""Workers that end, hang or cannot be started: other programs in their place, and the parent's bookkeeping."""

import asyncio
import errno
import sys
from pathlib import Path
from typing import Final

import pytest

from gateway.errors import WorkersFail
from gateway.workers.shared_counters import SharedCounters, WorkerState
from gateway.workers.supervisor import Workers
from tests.gateway.worlds import PATIENCE_S, on_loop, until

pytestmark = pytest.mark.turns


@on_loop
async def test_workers_that_end_as_often_as_they_are_started_are_given_up(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=2, nodes=1)
    board = SharedCounters(tmp_path / "board")
    board.be(WorkerState.READY)  # worker 0 is taken to serve
    commands = (["sleep", "1000"], [sys.executable, "-c", "raise SystemExit(3)"])
    now = asyncio.get_running_loop().time
    ended: list[int] = []
    workers = Workers(lambda number: commands[number], board, now, max_restarts=1, on_ended=ended.append)
    with pytest.raises(WorkersFail, match="worker 1 ended 2 times, at last with status 3"):
        await workers.run(lambda: None)
    assert board.restarts == 1
    assert ended == [1, 1]
    board.close()


@on_loop
async def test_a_worker_that_is_killed_from_outside_is_never_given_up(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=1, nodes=1)
    board, started = SharedCounters(tmp_path / "board"), []

    def command(number: int) -> list[str]:
        started.append(number)
        return [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]

    workers = Workers(command, board, asyncio.get_running_loop().time, max_restarts=1)
    running = asyncio.create_task(workers.run(lambda: None))
    await until(lambda: len(started) > 3)
    workers.stop()
    await running
    board.close()


@on_loop
async def test_a_worker_that_cannot_be_started_just_now_is_started_later(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=2, nodes=1)
    board = SharedCounters(tmp_path / "board")
    board.be(WorkerState.READY)  # worker 0 is taken to serve
    asked = [0, 0]

    def command(number: int) -> list[str]:
        asked[number] += 1
        if number and asked[1] == 1:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return ["sleep", "1000"] if asked[1] < 2 else [sys.executable, "-c", "raise SystemExit(3)"]

    now = asyncio.get_running_loop().time
    workers = Workers(command, board, now, max_restarts=1)
    with pytest.raises(WorkersFail, match="worker 1 ended 2 times, at last with status 3"):
        await workers.run(lambda: None)
    assert asked == [1, 2]
    board.close()


@on_loop
async def test_a_gateway_whose_workers_fail_ends_though_one_of_them_is_stuck(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=2, nodes=1)
    board = SharedCounters(tmp_path / "board")
    board.be(WorkerState.READY)  # worker 0 is taken to serve, and hears nothing any more
    stuck = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    commands = ([sys.executable, "-c", stuck], [sys.executable, "-c", "raise SystemExit(3)"])
    now = asyncio.get_running_loop().time
    workers = Workers(lambda number: commands[number], board, now, max_restarts=1, silence_s=2.0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkersFail, match="worker 1 ended 2 times"):
            await workers.run(lambda: None)
    board.close()


@on_loop
async def test_a_worker_that_says_nothing_is_killed_and_another_one_started(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=1, nodes=1)
    board, started = SharedCounters(tmp_path / "board"), []
    now = asyncio.get_running_loop().time

    def command(number: int) -> list[str]:
        started.append(number)
        board.be(WorkerState.READY)  # it is taken to serve, and never says so again
        return ["sleep", "1000"]

    workers = Workers(command, board, now, silence_s=0.5)
    running = asyncio.create_task(workers.run(lambda: None))
    await until(lambda: len(started) > 1)
    assert board.restarts >= 1
    workers.stop()
    await running
    board.close()


STUCK_AT_ITS_START: Final = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


@on_loop
async def test_a_worker_that_does_not_start_is_killed_and_another_one_started(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=1, nodes=1)
    board = SharedCounters(tmp_path / "board")
    now = asyncio.get_running_loop().time
    command = [sys.executable, "-c", STUCK_AT_ITS_START]
    workers = Workers(lambda number: command, board, now, max_restarts=1, start_s=0.2)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(WorkersFail, match="worker 0 ended 2 times, at last with status -9"):
            await workers.run(lambda: None)
    board.close()


@on_loop
async def test_a_gateway_ends_though_a_worker_is_stuck_at_its_start(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=1, nodes=1)
    board, started = SharedCounters(tmp_path / "board"), asyncio.Event()
    now = asyncio.get_running_loop().time

    def command(number: int) -> list[str]:
        started.set()
        return [sys.executable, "-c", STUCK_AT_ITS_START]

    workers = Workers(command, board, now, silence_s=0.5)
    running = asyncio.create_task(workers.run(lambda: None))
    await started.wait()
    await asyncio.sleep(0.3)  # until it hears no SIGTERM, mostly; where it does it ends by that
    workers.stop()
    async with asyncio.timeout(PATIENCE_S):
        await running
    board.close()


@on_loop
async def test_workers_leave_ports_on_which_another_gateway_serves(tmp_path: Path) -> None:
    SharedCounters.create(tmp_path / "board", workers=1, nodes=1)
    board, asked = SharedCounters(tmp_path / "board"), list[bool]()
    script = f"trap 'touch {tmp_path}/left; exit' USR1; touch {tmp_path}/up; while :; do sleep 0.05; done"

    def gives_way() -> bool:
        asked.append(True)
        return True

    now = asyncio.get_running_loop().time
    workers = Workers(lambda number: ["/bin/sh", "-c", script], board, now, gives_way=gives_way)
    running = asyncio.create_task(workers.run(lambda: None))
    await until((tmp_path / "up").exists)
    workers.stop()
    await running
    assert (tmp_path / "left").exists()
    assert asked == [True]
    board.close()
