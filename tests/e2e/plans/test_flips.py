"""Roles that change under a trace; `python -m tests.storm.flips` has two hundred of them."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import Models
from tests.e2e.tls import is_wanted
from tests.storm.flips import ARCH, Plan, flip_under_load

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """In place of the package's: here no other system runs."""


def test_no_request_notices_that_nodes_change_their_roles(models: Models, tmp_path: Path) -> None:
    plan = Plan(flips=8, rate=3.0, seed=3, rollback_every=4, calm=False, quiet=2, has_tls=is_wanted())
    results = asyncio.run(flip_under_load(models(ARCH), tmp_path, plan))
    print("\n".join(results.lines()))
    assert results.failures() == []
    assert {each.conversion.outcome for each in results.rollbacks} == {"drain_timeout", "verify_failed"}
    assert results.flipping.answered
