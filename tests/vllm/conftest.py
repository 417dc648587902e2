"""Models and running pairs of nodes, each started once for many tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.cases import CASES, Case, build
from tests.vllm.harness import Engine, Pair, make_pair, start_forge


@pytest.fixture(scope="session", autouse=True)
def _forge() -> None:
    start_forge()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def reference(case: Case, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM alone."""
    options = case.options(build(case.arch, models))
    engine = Engine("alone", tmp_path_factory.mktemp("alone"), options, "", None)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pair(case: Case, reference: Engine, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = make_pair(tmp_path_factory.mktemp(case.arch), case.options(build(case.arch, models)))
    reference.wait_ready()
    yield pair
    pair.close()
