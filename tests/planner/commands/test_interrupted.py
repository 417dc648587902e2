"""Ctrl-C ends a command of the planner at once, without a traceback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.planner.conftest import CONFIGS

WITHIN_S = 120.0  # a status says that it was interrupted


def started(*argv: str) -> "subprocess.Popen[str]":
    """A session of its own, as of a terminal, in which Ctrl-C is heard."""
    command = [sys.executable, "-m", "planner", *argv, "-c", str(CONFIGS / "case_study.toml")]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def interrupted(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=WITHIN_S)
        return process.returncode, err
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("module", ["prfaas", "planner"])
def test_while_modules_are_imported_there_is_no_traceback(module: str) -> None:
    """The signal comes in the middle of the import, from the module that is imported."""
    name = {"prfaas": "prfaas.cli", "planner": "planner.commands.cli"}[module]
    script = f"""
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Presser:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presser())
sys.argv = [{module!r}, "--version"]
runpy.run_module({module!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_simulation_in_several_processes_ends_at_once() -> None:
    process = started("simulate", "--requests", "100000", "--seeds", "8", "--processes", "2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(
        lambda: len(children.read_text().split()) >= 3
    )  # two that simulate, beside the one that tracks what is shared
    code, err = interrupted(process)
    assert code == -signal.SIGINT
    assert "planner/commands/cli.py" not in err
