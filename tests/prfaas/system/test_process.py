"""A child process of the command line."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from node.process.log_rotation import earlier
from prfaas.errors import StartError, StartKilled
from prfaas.system.process import Process

SAYS = "import sys; sys.exit({!r})"  # on standard error, with status 1
START_S = 60.0


def test_a_start_that_fails_is_told_with_its_own_last_words_only(tmp_path: Path) -> None:
    log = tmp_path / "far.log"

    async def scenario() -> None:
        for words in ("no such model", "address in use"):
            process = Process("far", ["-c", SAYS.format(words)], log)
            await process.start()
            with pytest.raises(StartError) as failure:
                await process.line("READY", START_S, print)
            assert str(failure.value).endswith(f"end of {log}:\n{words}\n")

    asyncio.run(scenario())
    assert (log.read_text(), earlier(log, 1).read_text()) == ("address in use\n", "no such model\n")


LATE = """
import sys, time
from pathlib import Path
print("noise", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("READY port=7", flush=True)
time.sleep(60)
"""
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
CRASHES = "import resource, os; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()"


def test_a_start_that_is_late_is_told_and_waited_for(tmp_path: Path) -> None:
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        (tmp_path / "told").touch()

    async def scenario() -> None:
        process = Process("far", ["-c", LATE, str(tmp_path / "told")], tmp_path / "far.log")
        await process.start()
        try:
            assert await process.line("READY", 0.2, tell, late_times=300) == {"port": "7"}
        finally:
            await process.stop(0.0)

    asyncio.run(scenario())
    assert told
    assert told[0].startswith("  far        is late: it has not said 'READY' after ")


def test_a_start_that_is_stuck_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = Process("far", ["-c", "import time; time.sleep(60)"], tmp_path / "far.log")
        await process.start()
        try:
            with pytest.raises(StartError, match="did not say 'READY' within 0 s"):
                await process.line("READY", 0.1, lambda line: None, late_times=2)
        finally:
            await process.stop(0.0)

    asyncio.run(scenario())


def test_a_start_that_was_killed_is_told_from_one_that_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = Process("far", ["-c", KILLED], tmp_path / "far.log")
        await process.start()
        with pytest.raises(StartKilled, match="far ended with status -9"):
            await process.line("READY", START_S, print)

    asyncio.run(scenario())


def test_a_start_that_crashes_failed_by_itself(tmp_path: Path) -> None:
    """It would crash again and again, and never be given up."""

    async def scenario() -> None:
        process = Process("far", ["-c", CRASHES], tmp_path / "far.log")
        await process.start()
        with pytest.raises(StartError, match="far ended with status -6") as failure:
            await process.line("READY", START_S, print)
        assert not isinstance(failure.value, StartKilled)

    asyncio.run(scenario())


LEAVES_ANOTHER = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(f"READY other={other.pid}", flush=True)
time.sleep(60)
"""


def test_the_end_of_a_process_does_not_wait_for_others_that_have_its_output(tmp_path: Path) -> None:
    async def scenario() -> None:
        process = Process("far", ["-c", LEAVES_ANOTHER], tmp_path / "far.log")
        await process.start()
        other = int((await process.line("READY", START_S, print))["other"])
        try:
            process.tell_to_end()
            async with asyncio.timeout(START_S):
                while process.returncode is None:  # noqa: ASYNC110 its end; its output has none
                    await asyncio.sleep(0.01)
                assert await process.stop(0.1, killed_s=0.1) == -signal.SIGTERM
        finally:
            os.kill(other, signal.SIGKILL)
            await process.stop(START_S)

    asyncio.run(scenario())
