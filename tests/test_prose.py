"""Documents, docstrings, comments and help texts read easily: short sentences, and no words that readers stumble over."""

from pathlib import Path

import pytest

from scripts import prose
from tests.test_docs import DOCS, name_of

ROOT = Path(__file__).parent.parent
# What a folder may still have. A bound only falls: rewrite what you touch, then lower it.
BOUNDS = {
    **dict.fromkeys(("benchmarks", "deploy", "engine", "examples", "gateway", "hybrid_cache", "node", "pd_cluster"), 0),
    **dict.fromkeys(("planner", "prfaas", "prfaas_cluster", "prompts", "scripts", "transport"), 0),
    "tests": 172,
}


@pytest.mark.parametrize("document", DOCS, ids=name_of)
def test_a_document_reads_easily(document: Path) -> None:
    assert prose.findings(document) == []


@pytest.mark.parametrize("folder", BOUNDS)
def test_a_folder_reads_easily(folder: str) -> None:
    found = [f"{path}: {each}" for path in prose.files([ROOT / folder]) for each in prose.findings(path)]
    assert len(found) <= BOUNDS[folder], "\n".join(found)


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
        (f'parser.add_argument("--x", help="{LONG}")\n', 1),
        (f'parser.add_argument("--x", help=f"{{y}} {LONG}")\n', 1),
        ('def f():\n    """Nobody asks."""\n', 1),
    ],
)
def test_what_is_found_in_python(tmp_path: Path, source: str, number: int) -> None:
    assert len(found_in(tmp_path, "module.py", source)) == number
