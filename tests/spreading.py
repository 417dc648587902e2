"""How a run is spread over processes: who rewrites and compiles which modules, and which files begin.

Every worker of pytest-xdist collects all tests. If all of them began with the same module, each would rewrite the
assertions of all modules itself, and compile all of the product. So each imports a share of its own first and leaves
what it made in `__pycache__`; what others have made it reads there.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def share_of(items: Sequence[T], worker: int, workers: int) -> Sequence[T]:
    """A run of neighbours, which import much the same. All shares together are all items."""
    return items[len(items) * worker // workers : len(items) * (worker + 1) // workers]


def modules_below(folder: Path, root: Path, ignored: Sequence[Path]) -> list[str]:
    """Names of the test modules of a folder, in the order of their collection."""
    found = sorted(folder.rglob("test_*.py"))
    kept = [path for path in found if not any(path.is_relative_to(out) for out in ignored)]
    return [".".join(path.relative_to(root).with_suffix("").parts) for path in kept]


def import_own_share(config: pytest.Config) -> None:
    """Does nothing where one process runs alone, or where files were named: then each of them is read once."""
    worker: Mapping[str, object] | None = getattr(config, "workerinput", None)
    folders = [config.invocation_params.dir / argument for argument in config.args]
    if worker is None or not all(folder.is_dir() for folder in folders):
        return
    ignored = [config.invocation_params.dir / path for path in config.getoption("ignore") or ()]
    names = [name for folder in folders for name in modules_below(folder, config.rootpath, ignored)]
    number = int(str(worker["workerid"]).removeprefix("gw"))
    for name in share_of(names, number, int(str(worker["workercount"]))):
        try:
            importlib.import_module(name)
        except (Exception, pytest.skip.Exception):
            continue  # its collection imports it again, and reports what is wrong
