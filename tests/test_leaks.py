"""Who leaves something behind is found out; who does not, and strangers, are not."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import leaks

# Makes a name in /dev/shm and says which; ends when told to, with the name gone or not.
MAKER = """
import os, sys
name = f"/dev/shm/test-leaks-{os.getpid()}"
file = open(name, "w")
print(name, flush=True)
sys.stdin.readline()
sys.argv[1] == "leaves" or os.unlink(name)
"""


class Maker:
    """A process that has made a name."""

    def __init__(self, how: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAKER, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.path = Path(self._process.stdout.readline().strip())

    def end(self) -> None:
        self._process.communicate("\n", timeout=60.0)


def nothing_is_left_behind() -> AbstractContextManager[set[str]]:
    """The same, found out soon."""
    return leaks.nothing_is_left_behind(patience_s=0.5, look_s=0.05)


@pytest.fixture
def stranger() -> Iterator[Maker]:
    made = Maker("leaves")
    yield made
    made.path.unlink()


def leave_one() -> None:
    with nothing_is_left_behind() as names:
        made = Maker("leaves")
        while made.path.name not in names:  # a look at it while it lives
            pass
        made.end()


def test_a_name_that_is_nobodys_any_more_is_found() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        leave_one()
    (name,) = re.findall(r"left behind: \['(test-leaks-\d+)'\]", str(failure.value))
    (leaks.SHARED_MEMORY / name).unlink()


def test_a_socket_is_found() -> None:
    code = "import os, socket; socket.socket(socket.AF_UNIX).bind(os.environ['TMPDIR'] + '/x')"
    with pytest.raises(pytest.fail.Exception, match=r"left behind: \['.*/x'\]"), nothing_is_left_behind():
        subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_taken_away_or_a_strangers_is_not(stranger: Maker) -> None:
    with nothing_is_left_behind():
        Maker("takes away").end()
        stranger.end()
