import subprocess
import sys
from pathlib import Path

import pytest

from node.engine.shm_cleanup import OF_SGLANG, remove, shared_by

MAPS = """
import mmap, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
input()
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return Path(f"{OF_SGLANG}{tmp_path.parent.name}_{tmp_path.name}.shm")


def test_what_a_server_has_mapped_is_found_and_removed_when_it_is_gone(shared: Path) -> None:
    command = [sys.executable, "-c", MAPS, str(shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        found = shared_by(server.pid)
    assert found == {shared}
    assert shared.exists()
    remove(found)
    assert not shared.exists()
    remove(found)


def test_of_who_is_gone_nothing_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as server:
        server.wait()
        assert shared_by(server.pid) == set()
