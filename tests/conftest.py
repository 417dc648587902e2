"""What all suites share: models for real engines, and no property that fails because the machine is busy."""

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.peers import Peers
from tests.properties import register_profiles
from tests.sampling import (  # noqa: F401 hooks of --sample
    pytest_addoption,
    pytest_configure,
    pytest_report_collectionfinish,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from tests.sampling import pytest_collection_modifyitems as sample
from tests.spreading import import_own_share

register_profiles()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Modules and tests stay: no collection of garbage looks at them, neither while they are made nor later."""
    gc.disable()
    import_own_share(session.config)
    result = yield
    gc.enable()
    gc.freeze()
    return result


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sample(config, items)
    if hasattr(config, "workerinput"):  # else a core that has the longest file left works alone at the end
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A `main` that ran in this process ignores signals when it ends; the tests after it, and their children, do not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    return Peers(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> "Models":
    return Models(tmp_path_factory.mktemp("models"))


class Models:
    """Tiny models, built when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, arch: str) -> Path:
        from engine.torch.tiny import build_model

        directory = self._root / arch
        if not directory.exists():
            build_model(arch, directory, report=lambda line: None)
        return directory
