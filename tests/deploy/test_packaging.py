"""What an installation is made of: ranges in the metadata, locks within them, and a changelog that a release can be cut from."""

import re
import tomllib
from pathlib import Path

import pytest

import prfaas
from scripts.lock import EXTRAS, WANTED
from scripts.lowest import lowest
from scripts.release import ReleaseError, notes, sections

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
LINES = 120


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def test_dependencies_are_ranges() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert len(lowest(*extras)) == len(PROJECT["project"]["dependencies"]) + sum(map(len, extras.values()))


def test_the_lock_is_within_the_ranges() -> None:
    pinned = locked("dev")
    extras = PROJECT["project"]["optional-dependencies"]
    ranges = [*PROJECT["project"]["dependencies"], *(each for extra in EXTRAS.split(",") for each in extras[extra])]
    for name, low, below in (re.split(">=|,<", each) for each in ranges):
        assert numbers(low) <= numbers(pinned[name.lower().replace("_", "-")]) < numbers(below), name


@pytest.mark.parametrize("environment", WANTED)
def test_an_environment_has_a_lock_of_what_it_asks_for(environment: str) -> None:
    asked = PROJECT["dependency-groups"][environment]
    groups = [each["include-group"] for each in asked if isinstance(each, dict)]
    names = [each for each in asked if isinstance(each, str)]
    names += [each for group in groups for each in PROJECT["dependency-groups"][group]]
    assert {name.lower() for name in names} <= locked(environment).keys()


def test_setup_installs_the_extras_that_are_locked() -> None:
    assert f'--constraint requirements/dev.lock --editable ".[{EXTRAS}]"' in (ROOT / "Makefile").read_text()


def test_the_changelog_has_room_for_what_comes_and_the_version_that_is() -> None:
    versions = list(sections(CHANGELOG))
    assert versions[:2] == ["Unreleased", prfaas.__version__]
    assert notes(CHANGELOG, prfaas.__version__).count("\n") <= LINES


def test_a_release_needs_a_dated_section() -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n- b\n\n## [0.2.0] - 2027-01-02\n\n- a\n\n## [0.1.0] - 2026-11-26\n"
    assert notes(text, "0.2.0") == "# prfaas 0.2.0\n\n- a\n"
    for version in ("Unreleased", "0.1.0", "0.3.0"):
        with pytest.raises(ReleaseError, match=version):
            notes(text, version)
