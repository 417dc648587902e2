"""What the docs name is there: files, modules, names in them, make's targets, and the places that links lead to."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_walls import PACKAGES
from tests.vllm import cases

ROOT = Path(__file__).parent.parent
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples")),
]
# A file of ours, with or without its folder; what a reader would write himself (`my.toml`) has another look: see EXAMPLES.
FILE = re.compile(r"(?<![\w./~$*-])((?:[\w-]+/)*[\w-]+\.(?:py|c|toml|md))\b")
EXAMPLES = {"my.toml", "east-p0.toml"}
# `python -m engine.vllm.launch`, `hybrid_cache.layout.layout.transfer_ranges(...)`, `transport.control.credentials`
DOTTED = re.compile(rf"(?:`|python -m )((?:{'|'.join((*PACKAGES, 'benchmarks', 'tests'))})(?:\.\w+)+)(?!\.?\w)")
TARGET = re.compile(r"(?:`|^ {4})make ([a-z][a-z0-9-]*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)?(?:#([^)]+))?\)")


def found(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(document, what matched), each once."""
    return sorted({(path.name, text) for path in DOCS for text in pattern.findall(path.read_text())})


def folders() -> Iterator[Path]:
    """Where a path may begin: at the top, or in a package or one of its rooms, when the text speaks of it."""
    yield ROOT
    for package in (*PACKAGES, "configs", "docs", "tests", "benchmarks", "examples"):
        yield ROOT / package
        yield from (path for path in (ROOT / package).rglob("*") if path.is_dir())


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def exists(dotted: str) -> bool:
    """Whether the longest part that is a module is there, and what follows is said in it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.exists():
            return length == len(parts) or re.search(rf"\b{parts[length]}\b", source.read_text()) is not None
    return False


@pytest.mark.parametrize(("document", "file"), [each for each in found(FILE) if each[1] not in EXAMPLES])
def test_a_file_that_is_named_is_there(document: str, file: str) -> None:
    assert any((folder / file).exists() for folder in folders())


@pytest.mark.parametrize(("document", "dotted"), found(DOTTED))
def test_a_module_and_what_is_named_in_it_are_there(document: str, dotted: str) -> None:
    assert exists(dotted)


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert exists("hybrid_cache.layout.layout.transfer_ranges")
    assert not exists("hybrid_cache.layout.layout.no_such_name")
    assert not exists("transport.no_such_room.engine")


@pytest.mark.parametrize(("document", "target"), found(TARGET))
def test_a_target_of_make_is_there(document: str, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for file, heading in LINK.findall(document.read_text()):
        target = document.parent / file if file else document
        assert target.exists(), file
        assert not heading or heading in headings(target), heading


def test_the_table_of_models_is_that_of_the_tests() -> None:
    assert cases.table() in (ROOT / "docs" / "vllm.md").read_text()
