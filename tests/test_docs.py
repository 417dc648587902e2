"""What the docs name is there: files, modules, names in them, make's targets, and the places that links lead to.

The pages stay readable, too: a short README, and lines that fit a screen. Sentences are tests/test_prose.py's.
"""

import functools
import re
import unicodedata
from pathlib import Path

import pytest

from tests.test_walls import PACKAGES
from tests.vllm import cases

ROOT = Path(__file__).parent.parent
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
]
# A file of ours, with or without its folder; what a reader would write himself (`my.toml`) has another look: see EXAMPLES.
FILE = re.compile(r"(?<![\w./~$*-])((?:[\w-]+/)*[\w-]+\.(?:py|c|toml|md))\b")
EXAMPLES = {"my.toml", "east-p0.toml", "nodes.toml"}
# `python -m engine.vllm.launch`, `hybrid_cache.layout.transfers.transfer_ranges(...)`, `transport.control.credentials`
DOTTED = re.compile(rf"(?:`|python -m )((?:{'|'.join((*PACKAGES, 'benchmarks', 'tests'))})(?:\.\w+)+)(?!\.?\w)")
TARGET = re.compile(r"(?:`|^ {4})make ([a-z][a-z0-9-]*)", re.MULTILINE)
# A name of code alone in backticks: `PLACERS`, `route`.
NAME = re.compile(r"`([A-Za-z_]\w+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)?(?:#([^)]+))?\)")


README_LINES = 100
LINE_CHARACTERS = 120  # cells of tables may be longer: they wrap where they are read
ARCHITECTURE_LINES = 150


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def found(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(document, what matched), each once."""
    return sorted({(name_of(path), text) for path in DOCS for text in pattern.findall(path.read_text())})


@functools.cache
def folders() -> tuple[Path, ...]:
    """Where a path may begin: at the top, or in a package or one of its rooms, when the text speaks of it."""
    tops = [ROOT / package for package in (*PACKAGES, "configs", "docs", "tests", "benchmarks", "examples")]
    inside = [path for top in tops for path in top.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    return (ROOT, *tops, *inside)


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings that the site and GitHub call alike."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {on_github(title) for title in titles} & {on_the_site(title) for title in titles}


def on_github(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def on_the_site(title: str) -> str:
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


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
    assert exists("hybrid_cache.layout.transfers.transfer_ranges")
    assert not exists("hybrid_cache.layout.layout.no_such_name")
    assert not exists("transport.no_such_room.engine")


@pytest.mark.parametrize(("document", "target"), found(TARGET))
def test_a_target_of_make_is_there(document: str, target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    for file, heading in LINK.findall(document.read_text()):
        target = document.parent / file if file else document
        assert target.exists(), file
        assert not heading or heading in headings(target), heading


def test_the_table_of_models_is_that_of_the_tests() -> None:
    assert cases.table() in (ROOT / "docs" / "guides" / "vllm.md").read_text()


PAGES = [path for path in DOCS if path.is_relative_to(ROOT / "docs")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_site_stay_in_it(page: Path) -> None:
    for file, _ in LINK.findall(page.read_text()):
        assert not file or (page.parent / file).resolve().is_relative_to(ROOT / "docs"), file


def test_the_site_has_every_page() -> None:
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in PAGES)


def sections(page: Path) -> dict[str, str]:
    """The text below each heading of the second level."""
    _, *parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def code_named(text: str) -> str:
    """What the files and folders say that a text names."""
    paths = [ROOT / name for name in re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", text)]
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return "\n".join(file.read_text() for file in files if file.suffix in {".py", ".yml", ".proto"})


EXTENDING = sections(ROOT / "docs" / "extending.md")


@pytest.mark.parametrize("title", EXTENDING)
def test_names_are_in_the_files_that_their_section_names(title: str) -> None:
    code = code_named(EXTENDING[title])
    assert [name for name in set(NAME.findall(EXTENDING[title])) if not re.search(rf"\b{name}\b", code)] == []


def test_the_first_minute_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= ARCHITECTURE_LINES
    assert "Not run on a GPU yet" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", DOCS, ids=name_of)
def test_a_line_fits_a_screen(document: Path) -> None:
    lines = enumerate(document.read_text().splitlines(), start=1)
    assert [n for n, line in lines if len(line) > LINE_CHARACTERS and not line.startswith("|")] == []
