"""SIGHUP has a file read again, SIGUSR2 a gateway replaced; neither ends a process whose modules are still being imported."""

import subprocess
import sys

import pytest

HANG_UP = """
import importlib.abc, os, runpy, signal, sys

class HangUp(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {imported!r}:
            os.kill(os.getpid(), signal.SIGHUP)
            if "gateway" in {argv!r}:
                os.kill(os.getpid(), signal.SIGUSR2)

sys.meta_path.insert(0, HangUp())
sys.argv = {argv!r}
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("argv", "imported"),
    [
        (["gateway", "--help"], "gateway.main"),
        (["pd_cluster", "--help"], "node.main"),
        (["prfaas_cluster", "--help"], "node.main"),
        (["prfaas", "gateway", "-c", "no such file"], "gateway.main"),
        (["prfaas", "node", "-c", "no such file"], "node.main"),
        (["planner", "serve", "-c", "no such file"], "planner.service.server"),
    ],
)
def test_a_hang_up_while_modules_are_imported_ends_nothing(argv: list[str], imported: str) -> None:
    command = [sys.executable, "-c", HANG_UP.format(argv=argv, imported=imported)]
    status = subprocess.run(command, capture_output=True, timeout=120.0, check=False).returncode
    assert status == (0 if "--help" in argv else 2)
