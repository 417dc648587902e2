"""Models and running pairs of nodes, each started once for many tests.

Tests run case by case, whatever their module: a reference and a pair of nodes are started for a case, serve all that want
them, and are closed when the next case comes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import nothing_is_left_behind
from tests.sampling import MARKER
from tests.vllm.cases import CASES, Case, build
from tests.vllm.harness import Engine, Pair, make_pair, start_forge


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a case first: servers take both cores. What starts or kills engines of its own comes last of its case."""
    folder = Path(__file__).parent
    ours = [item for item in items if folder in item.path.parents]
    ordered = iter(sorted(ours, key=lambda item: _place(item)))
    items[:] = [next(ordered) if folder in item.path.parents else item for item in items]


def _place(item: pytest.Item) -> tuple[int, int]:
    order = [str(case) for case in CASES]
    spec, mark = getattr(item, "callspec", None), item.get_closest_marker(MARKER)
    case = str(spec.params["case"]) if spec and "case" in spec.params else (mark.kwargs.get("case") if mark else None)
    modules = (
        "test_matrix",
        "test_failures",
        "test_preemptions",
        "test_tiers",
        "test_tensor_parallel",
        "test_pipeline_parallel",
    )
    module = item.path.stem
    return (order.index(case) if case in order else -1, modules.index(module) if module in modules else -1)


class Fleet:
    """The engines of one case at a time."""

    def __init__(self, models: Path, folders: pytest.TempPathFactory) -> None:
        self._models = models
        self._folders = folders
        self._case: Case | None = None
        self._reference: Engine | None = None
        self._pair: Pair | None = None

    def reference(self, case: Case) -> Engine:
        """vLLM alone; it may still be starting."""
        if case != self._case:
            self.close()
            self._case = case
        if self._reference is None or not self._reference.process.is_alive():
            folder = self._folders.mktemp(f"alone-{case}")
            self._reference = Engine("alone", folder, case.options(build(case.arch, self._models)), "", None)
        return self._reference

    def pair(self, case: Case) -> Pair:
        reference = self.reference(case)
        if self._pair is None or not self._pair.is_alive():
            self.close_pair()
            self._pair = make_pair(self._folders.mktemp(f"pair-{case}"), case.options(build(case.arch, self._models)))
        reference.wait_ready()
        return self._pair

    def close_pair(self) -> None:
        """Makes room for engines of other kinds."""
        if self._pair is not None:
            self._pair.close()
        self._pair = None

    def close(self) -> None:
        self.close_pair()
        if self._reference is not None:
            self._reference.close()
        self._reference = self._case = None


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with nothing_is_left_behind():
        yield


@pytest.fixture(scope="session", autouse=True)
def _forge(_nothing_is_left_behind: None) -> None:
    start_forge()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def fleet(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(models, tmp_path_factory)
    yield fleet
    fleet.close()


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def reference(case: Case, fleet: Fleet) -> Engine:
    """vLLM alone."""
    return fleet.reference(case)


@pytest.fixture(scope="module")
def pair(case: Case, fleet: Fleet) -> Pair:
    return fleet.pair(case)
