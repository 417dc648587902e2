"""A sample of `make test-migration`: decode nodes are killed under their streams, whose clients do not notice."""

import pytest

from tests.e2e.harness import Bench
from tests.storm.migration import Migration, Tally

pytestmark = pytest.mark.e2e

STREAMS = 4
"""To be taken over; nodes are killed until so many were."""


def test_streams_go_on_elsewhere_with_the_same_bytes(bench: Bench) -> None:
    tally, told = Tally(), list[str]()
    migration = Migration(bench, tally, told.append, batch=6, ways=("engine", "node"))
    bench.run(migration.run(STREAMS), timeout_s=280.0)
    assert not tally.wrong, told
    assert tally.killed >= STREAMS
