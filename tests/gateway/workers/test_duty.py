"""Of processes that share a folder, one is on duty, until it ends."""

import subprocess
import sys
from pathlib import Path

from gateway.workers.duty import Duty

ASKS = """
import sys
from pathlib import Path
from gateway.workers.duty import Duty
duty = Duty(Path(sys.argv[1]))
print(duty(), duty(), flush=True)
sys.stdin.read()
"""


def asking(path: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that has asked twice, and its answers."""
    process = subprocess.Popen(
        [sys.executable, "-c", ASKS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_one_process_is_on_duty_and_the_next_one_when_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "duty"
    first, answers = asking(path)
    try:
        assert answers == "True True"
        own = Duty(path)
        assert not own()
        second, answers = asking(path)
        second.communicate(timeout=60)
        assert answers == "False False"
    finally:
        first.kill()
        first.communicate(timeout=60)
    assert own()
    assert asked_once(path) == "False False"


def test_a_process_that_is_about_to_end_leaves_it_to_another(tmp_path: Path) -> None:
    own = Duty(tmp_path / "duty")
    assert own()
    own.give_up()
    assert asked_once(tmp_path / "duty") == "True True"
    assert own()


def asked_once(path: Path) -> str:
    process, answers = asking(path)
    process.communicate(timeout=60)
    return answers


def test_a_process_alone_is_on_duty_and_one_without_its_folder_is_not(tmp_path: Path) -> None:
    assert Duty(None)()
    assert not Duty(tmp_path / "gone" / "duty")()
