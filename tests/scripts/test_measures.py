"""What `scripts/measures` counts, over a small tree, and that it has all its lines over this one."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measures"

FILES = {
    "pyproject.toml": (
        '[[tool.importlinter.contracts]]\ntype = "layers"\ncontainers = ["gateway"]\nlayers = ["http | admin", "errors"]\n'
    ),
    "gateway/errors.py": "from gateway.http.body import Body\n\n\nclass Failed(Exception): ...\n",
    "gateway/http/body.py": "import gateway.errors\n\n\nclass Body: ...\n\n\nclass _Part: ...\n",
    "gateway/admin/page.py": "def page():\n    from gateway.http import body\n\n\nclass Body: ...\n",
    "node/long.py": "def long():\n" + "    pass\n" * 60 + "\n\ndef short():\n" + "    pass\n" * 59,
    "tests/test_body.py": (
        '"""Whoever reads this.\n\nThe rest."""\n'
        "from tests.gateway.worlds import world as a_world\n\n"
        "async def test(monkeypatch):\n"
        "    monkeypatch.setattr('x', 'Whoever')  # nobody, of which none is none\n"
        "    monkeypatch.setenv('HOME', '/')\n"
        "    async with a_world() as one, a_world(2) as two:\n        world()\n"
    ),
    "docs/index.md": "Nobody.\nThe rest.\n",
}


@pytest.fixture(scope="module")
def measures() -> ModuleType:
    spec = spec_from_loader("measures", SourceFileLoader("measures", str(SCRIPT)))
    assert spec is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))  # as Python does for a script
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_measure_counts_what_it_says(measures: ModuleType, tree: Path) -> None:
    assert {each.name: each.value for each in measures.measures(tree)} == {
        "modules per folder": "at most 1 (gateway/admin) in 5 folders, 0 above 14",
        "public classes": "1 of 2 names stand for several classes",
        "edges between rooms": "3, by 3 imports",
        "imports that run back": "2",
        "functions above 60 lines": "1",
        "monkeypatches in tests": "1",
        "whole gateways in tests": "2",
        "stumbling words in comments and docstrings": "26.8 per 1,000 lines (4)",
        "stumbling words in documents": "500.0 per 1,000 lines (1)",
        "long sentences in comments and docstrings": "0",
        "long sentences in documents": "0",
    }


def test_what_is_counted_is_listed(measures: ModuleType, tree: Path) -> None:
    counted = {each.name: each.counted for each in measures.measures(tree)}
    assert counted["public classes"] == ["Body: gateway.admin.page, gateway.http.body"]
    assert sorted(counted["imports that run back"]) == [
        "gateway.admin.page imports gateway.http.body",
        "gateway.errors imports gateway.http.body",
    ]
    assert counted["functions above 60 lines"] == ["node/long.py:1 long: 61"]
    assert counted["whole gateways in tests"] == ["tests/test_body.py: 2"]


def test_it_prints_a_line_for_each(measures: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measures.main(["--root", str(tree)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11
    assert measures.main(["--root", str(tree), "--all"]) == 0
    assert "    tests/test_body.py: 2\n" in capsys.readouterr().out
