"""What dead nodes left behind goes; what lives stays."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.process.owned_names import OwnedDirectory, create_file, sweep_directories, sweep_files

OWNER = """
import os, sys
from pathlib import Path
from node.process.owned_names import OwnedDirectory, create_file
directory = OwnedDirectory(Path(sys.argv[1]))
create_file(Path(sys.argv[1]) / f"prfaas-n0-{os.getpid()}")
print(directory.path.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(parent: Path) -> Iterator[tuple[subprocess.Popen[str], set[str]]]:
    """A process that owns a directory and a file, and their names."""
    command = [sys.executable, "-c", OWNER, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        yield process, {name, f"prfaas-n0-{process.pid}"}
        process.kill()


def sweep(parent: Path) -> list[Path]:
    return sweep_files(parent) + sweep_directories(parent)


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


def test_what_lives_stays_and_what_was_killed_goes(tmp_path: Path) -> None:
    (tmp_path / "prfaas-of-somebody-else").mkdir()
    (tmp_path / "other").touch()
    with owner(tmp_path) as (process, owned):
        assert sweep(tmp_path) == []
        assert names(tmp_path) == {*owned, "prfaas-of-somebody-else", "other"}
        process.kill()
        process.wait()
        assert {path.name for path in sweep(tmp_path)} == owned
    assert names(tmp_path) == {"prfaas-of-somebody-else", "other"}


def test_a_name_that_ends_with_the_id_of_a_living_process_stays(tmp_path: Path) -> None:
    (tmp_path / f"prfaas-n0-{os.getppid()}").touch()
    (tmp_path / f"prfaas-n0-{os.getpid()}").touch()  # of an earlier start, in another life of this container
    assert [path.name for path in sweep(tmp_path)] == [f"prfaas-n0-{os.getpid()}"]
    assert names(tmp_path) == {f"prfaas-n0-{os.getppid()}"}


def test_who_sweeps_does_not_lose_its_own(tmp_path: Path) -> None:
    arena = tmp_path / f"prfaas-n0-{os.getpid()}"
    fd, directory = create_file(arena), OwnedDirectory(tmp_path)
    assert sweep(tmp_path) == []
    directory.close()
    os.close(fd)
    assert names(tmp_path) == {arena.name}
    assert sweep(tmp_path) == [arena]


def test_what_an_operator_calls_after_the_project_stays(tmp_path: Path) -> None:
    files = {"prfaas-up.log", "prfaas-notes", "prfaas-0.toml"}
    for name in files:
        (tmp_path / name).write_text("an operator's")
    (tmp_path / "prfaas-n0-4194999").touch()  # beyond the largest process id: no process has it
    (tmp_path / "prfaas-7").symlink_to(tmp_path / "prfaas-notes")
    assert sweep_directories(tmp_path) == []  # no file of any name, where there are no arenas
    assert [path.name for path in sweep_files(tmp_path)] == ["prfaas-n0-4194999"]
    assert names(tmp_path) == {*files, "prfaas-7"}


def half_made(parent: Path) -> list[Path]:
    """What is left of processes that were killed while they made a directory, in this order, and a file."""
    made = [parent / f".prfaas-{name}" for name in ("empty_00", "unlocked", "locked_0", "n0-4194999")]
    for directory in made[:3]:
        directory.mkdir()
    (made[1] / ".owner").touch()
    (made[2] / "owner").touch()
    made[3].touch()
    return made


def test_what_was_never_finished_goes_too(tmp_path: Path) -> None:
    kept = {".prfaas-of-somebody-else", ".prfaas.toml", f".prfaas-n0-{os.getppid()}"}
    for name in kept:
        (tmp_path / name).mkdir()
    made = half_made(tmp_path)
    assert sorted(sweep(tmp_path)) == sorted(made)
    assert names(tmp_path) == kept


def test_what_is_being_made_stays_or_is_made_again(tmp_path: Path) -> None:
    stop = threading.Event()

    def sweep_on() -> None:
        while not stop.is_set():
            sweep(tmp_path)

    sweeping = threading.Thread(target=sweep_on)
    sweeping.start()
    try:
        for number in range(200):
            directory, path = OwnedDirectory(tmp_path), tmp_path / f"prfaas-n{number}-{os.getpid()}"
            fd = create_file(path)
            assert (directory.path / "owner").exists()
            assert path.exists()
            os.close(fd)
            directory.close()
    finally:
        stop.set()
        sweeping.join()
