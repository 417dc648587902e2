"""Rooms have walls: imports go one way, nothing grows beyond what one reads in one sitting, and tests look in by the door."""

import ast
import functools
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "gateway", "prfaas_cluster", "pd_cluster", "hybrid_cache", "transport", "planner", "engine", "node", "prfaas", "prompts",
    "membership",
)  # fmt: skip
MAX_LINES = 500
MAX_METHODS = 30
MAX_MODULES = 14
MAX_REPEATED = 20  # class names that stand for more than one class


def generated(path: Path) -> bool:
    return "_pb2" in path.name


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if not generated(path))


@dataclass(frozen=True, slots=True)
class Seen:
    """What walls look at in a file: a tree of its imports alone, its classes with their methods, privates it names."""

    imports: ast.Module
    methods: list[tuple[str, int]]
    privates: list[str]


@functools.cache
def seen(path: Path) -> Seen:
    """A file is parsed once; its whole tree is not kept."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = [
        (node.name, sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body))
        for node in classes
    ]
    return Seen(ast.Module(list(imports), []), methods, private_names(nodes))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules of ours that a module names anywhere: at the top, in functions, under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & modules or {node.module}
            found |= {node.module} if whole - modules else set()
    return found & modules


def import_graph() -> dict[str, set[str]]:
    paths = {module_of(path): path for path in sources(*PACKAGES)}
    graph = {name: imports_of(seen(path).imports, set(paths)) for name, path in paths.items()}
    return {name: imported - {name} for name, imported in graph.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """What is left when modules that import nothing more, and those that no module imports, are taken away."""
    left = {name: set(imported) for name, imported in graph.items()}
    while ends := {name for name, imported in left.items() if not imported}:
        left = {name: imported - ends for name, imported in left.items() if name not in ends}
    while ends := left.keys() - set().union(*left.values()):
        left = {name: imported for name, imported in left.items() if name not in ends}
    return [sorted(left)] if left else []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"c"}}
    assert circles(graph) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_imports_count_wherever_they_stand() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from x.y import A\n"
        "def f():\n    import x.z\nfrom x import w, B\n"
    )
    assert imports_of(tree, {"x", "x.y", "x.z", "x.w", "x.v"}) == {"x", "x.y", "x.z", "x.w"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(import_graph()) == []


@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "tests"])
def test_a_file_is_read_in_one_sitting(folder: str) -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources(folder)}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "tests"])
def test_a_room_has_a_dozen_modules_or_so(folder: str) -> None:
    rooms = Counter(str(path.relative_to(ROOT).parent) for path in sources(folder) if path.name != "__init__.py")
    assert {room: count for room, count in rooms.items() if count > MAX_MODULES} == {}


@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "tests"])
def test_a_class_is_one_idea(folder: str) -> None:
    many = {
        f"{path.relative_to(ROOT)}:{name}": methods
        for path in sources(folder)
        for name, methods in seen(path).methods
        if methods > MAX_METHODS
    }
    assert many == {}


def public_classes() -> dict[str, set[str]]:
    """The modules that define each public class name."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sources(*PACKAGES, "benchmarks", "deploy"):
        for name, _ in seen(path).methods:
            if not name.startswith("_"):
                found[name].add(str(path.relative_to(ROOT)))
    return found


def explained() -> dict[str, set[str]]:
    """The rows of the glossary's last table: a name, and the modules that share it."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    return {name: set(re.findall(r"`([\w/.]+)`", modules)) for name, modules in rows}


def test_a_class_name_means_one_class_or_the_glossary_says_why() -> None:
    repeated = {name: modules for name, modules in public_classes().items() if len(modules) > 1}
    assert repeated == explained()
    assert len(repeated) <= MAX_REPEATED


def private_names(nodes: Iterable[ast.AST]) -> list[str]:
    """What a module names of others that they call private: attributes and imports. (os._exit is public all the same.)"""
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Call):  # super()._name() is one's own
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")):
                found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith("_") and not name.startswith("__")]


def test_a_reach_into_somebodys_privates_is_found() -> None:
    tree = ast.parse("from a import _b\nself._c = super()._d()\ne._f.g = cls._h\ne.__class__\nself.i._j()\n")
    assert sorted(private_names(ast.walk(tree))) == ["_b", "_f", "_j"]


# What vLLM and SGLang call private is looked at on purpose there: their next versions may have it otherwise.
@pytest.mark.parametrize(
    "folder",
    sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in {"vllm", "sglang"}),
)
def test_tests_see_what_everybody_may_see(folder: str) -> None:
    reaches = {str(path.relative_to(ROOT)): seen(path).privates for path in sources(f"tests/{folder}")}
    assert {path: names for path, names in reaches.items() if names} == {}


def test_what_a_compiled_wheel_compiles_is_there_and_can_be() -> None:
    """mypyc cannot make dataclasses with slots: importing one fails."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert not hook["mypyc"]["enable-by-default"]
    with_slots = [
        path
        for path in (each.lstrip("/") for each in hook["mypyc"]["include"])
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call) and any(keyword.arg == "slots" for keyword in node.keywords)
    ]
    assert with_slots == []
