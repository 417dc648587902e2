"""Two states of the code are told apart, whatever their version says."""

import re
import tomllib
from pathlib import Path

from transport.control.release import PACKAGES, SITE, digest_of, release

SOURCES = {"gateway/server/app.py": "x = 1\n", "node/agent.py": "y = 2\n"}


def written(folder: Path, sources: dict[str, str]) -> Path:
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_change_of_any_source_shows_and_nothing_else_does(tmp_path: Path) -> None:
    here = digest_of(written(tmp_path / "here", SOURCES))
    assert digest_of(written(tmp_path / "there", {**SOURCES, "tests/test_it.py": "", "gateway/notes.txt": "x"})) == here
    for changed in ({"gateway/server/app.py": "x = 2\n"}, {"gateway/more.py": ""}, {"node/agent.py": "y = 2"}):
        assert digest_of(written(tmp_path / str(changed), {**SOURCES, **changed})) != here


def test_a_file_that_an_editor_has_locked_keeps_nothing_from_starting(tmp_path: Path) -> None:
    before = digest_of(written(tmp_path, SOURCES))
    (tmp_path / "node" / ".#agent.py").symlink_to("ann@machine.4711:1700000000")
    assert digest_of(tmp_path) == before


def test_every_package_of_the_wheel_counts() -> None:
    document = tomllib.loads((SITE / "pyproject.toml").read_text())
    assert sorted(PACKAGES) == sorted(document["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert re.fullmatch(r"\S+\+[0-9a-f]{10}", release())
