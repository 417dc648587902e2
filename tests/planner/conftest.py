from pathlib import Path

import pytest

from planner.model.site import Site, load_site
from planner.solve.goals import ServiceTime
from planner.solve.problem import Problem, SolveOptions, pose

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="session")
def case_study() -> Site:
    return load_site(CONFIGS / "case_study.toml")


@pytest.fixture(scope="session")
def of_mean(case_study: Site) -> Problem:
    """The case study with T(E[L]), all thresholds."""
    return pose(case_study, SolveOptions(service=ServiceTime.OF_MEAN))


@pytest.fixture(scope="session")
def exact(case_study: Site) -> Problem:
    """The case study with E[T(L)]."""
    return pose(case_study, SolveOptions())
