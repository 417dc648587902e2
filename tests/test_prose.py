"""What a reader or an operator reads is easy to read: short sentences, and no words that readers stumble over."""

from pathlib import Path

import pytest

from scripts import prose
from tests.test_docs import DOCS, name_of

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "engine",
    "gateway",
    "hybrid_cache",
    "membership",
    "node",
    "pd_cluster",
    "planner",
    "prfaas",
    "prfaas_cluster",
    "prompts",
    "transport",
)
AROUND = ".ci", ".github", "benchmarks", "configs", "deploy", "examples", "scripts", "tests"
FILES = ".pre-commit-config.yaml", "Makefile", "mkdocs.yml", "pyproject.toml"


@pytest.mark.parametrize("document", DOCS, ids=name_of)
def test_a_document_reads_easily(document: Path) -> None:
    assert prose.findings(document) == []


@pytest.mark.parametrize("place", [*PACKAGES, *AROUND, *FILES])
def test_a_place_reads_easily(place: str) -> None:
    found = [f"{path}: {each}" for path in prose.files([ROOT / place]) for each in prose.findings(path)]
    assert found == [], "\n".join(found)


def found_in(tmp_path: Path, name: str, text: str) -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return prose.findings(path)


LONG = "word " * 26


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (LONG, 1),
        (f"{LONG}\n\n{LONG}", 2),
        ("word " * 25, 0),
        (f"{'word ' * 13}. {'word ' * 13}", 0),
        (f"{'word ' * 13}: {'word ' * 13}", 0),
        (f"- {'word ' * 13}\n- {'word ' * 13}", 0),
        (f"- {'word ' * 13}\n  {'word ' * 13}", 1),
        (f"| {'word ' * 13} | {'word ' * 13} |", 0),
        (f"| {LONG} |", 1),
        (f"```\n{LONG}\n```\n", 0),
        (f"Text.\n\n    {LONG}\n", 0),
        (f"`{LONG}`", 0),
        (f"# {'word ' * 13}\n{'word ' * 13}", 0),
        ("Whoever reads this, of which there is one.", 2),
        ("Who may ask?", 0),
        ("It is None.", 0),
    ],
)
def test_what_is_found_in_markdown(tmp_path: Path, text: str, number: int) -> None:
    assert len(found_in(tmp_path, "text.md", text)) == number


@pytest.mark.parametrize(
    ("source", "number"),
    [
        (f'"""{LONG}"""\n', 1),
        (f'"""Text.\n\nname    {"word " * 13}\nother   {"word " * 13}\n"""\n', 0),
        (f"# {'word ' * 13}\n# {'word ' * 13}\nx = 1\n", 1),
        (f"x = 1  # {'word ' * 13}\ny = 1  # {'word ' * 13}\n", 0),
        (f'x = "{LONG}"\n', 0),
        (f'raise ValueError("{LONG}")\n', 1),
        (f'raise ValueError("a " + f"{{x}} {LONG}")\n', 1),
        (f'raise Refused("{LONG}" if x else "{LONG}")\n', 2),
        (f'errors.append(SettingsError("{LONG}"))\n', 1),
        (f'log.warning("{LONG}", x)\n', 1),
        (f'print("{LONG}")\n', 0),
        (f'parser.add_argument("--x", help="{LONG}")\n', 1),
        (f'parser.add_argument("--x", help=f"{{y}} {LONG}")\n', 1),
        ('def f():\n    """Nobody asks."""\n', 1),
    ],
)
def test_what_is_found_in_python(tmp_path: Path, source: str, number: int) -> None:
    assert len(found_in(tmp_path, "module.py", source)) == number


@pytest.mark.parametrize(
    ("source", "number"),
    [
        (f"# {LONG}\nx = 1\n", 1),
        (f"# {'word ' * 13}\n# {'word ' * 13}\nx = 1\n", 1),
        (f"x = 1  # {'word ' * 13}\ny = 1  # {'word ' * 13}\n", 0),
        (f"run:  ## {LONG}\n", 1),
        (f"x = '{LONG}'\n", 0),
        ("#!/usr/bin/env bash\n# Nobody asks.\n", 1),
    ],
)
def test_what_is_found_in_a_configuration_and_a_script(tmp_path: Path, source: str, number: int) -> None:
    assert len(found_in(tmp_path, "file", source)) == number


def test_a_script_without_a_suffix_is_read(tmp_path: Path) -> None:
    for name, text in {"script": "#!/bin/sh\n", "data": "# x\n", "a.toml": "", "a.lock": "#!\n"}.items():
        (tmp_path / name).write_text(text)
    assert [path.name for path in prose.files([tmp_path])] == ["a.toml", "script"]
