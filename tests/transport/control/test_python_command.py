"""What a process of ours starts in Python is ours, in whichever folder it is started."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from transport.control.python_command import python_module

ROOT = Path(__file__).parent.parent.parent.parent
PACKAGES = ("gateway", "engine", "node", "pd_cluster", "prfaas_cluster", "planner", "prfaas", "transport")
HOSTILE = "from pathlib import Path\nPath(__file__).with_name('taken').touch()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with modules of well-known names."""
    for name in ("json", "socket", "engine", "gateway", "pd_cluster", "planner", "transport"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    return tmp_path


def run(command: list[str], folder: Path) -> int:
    return subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode


def test_the_folder_is_hostile(folder: Path) -> None:
    run([sys.executable, "-m", "engine"], folder)
    assert (folder / "taken").exists()


@pytest.mark.parametrize("module", ["engine", "engine.vllm.launch", "gateway", "pd_cluster", "planner"])
def test_nothing_of_the_current_folder_is_run(module: str, folder: Path) -> None:
    assert run([*python_module(module), "--help"], folder) == 0
    assert not (folder / "taken").exists()


def test_no_process_of_ours_is_started_otherwise() -> None:
    unsafe = re.compile(r"sys\.executable,\s*(\*|\"-[mc]\")")
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any("-P" not in line and "SAFE" not in line and "-I" not in line for line in unsafe_lines(path, unsafe))
    ]
    # Their commands begin with SAFE_PATH where they are made.
    assert sorted(found) == ["engine/sglang/launch.py", "engine/vllm/launch.py"]


def unsafe_lines(path: Path, unsafe: "re.Pattern[str]") -> list[str]:
    return [line for line in path.read_text().splitlines() if unsafe.search(line)]
