"""Coding chooses itself while the line binds, and stops when it does not: the benchmark's system, with fewer prompts."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.transport.live_coding import CodingRow, measure
from transport.coding.codec import zstd_module

pytestmark = pytest.mark.e2e
NARROW_GBPS = 0.5
TIMES = 6.0


def binding(wide: CodingRow) -> float:
    """A line that is slower than this machine, however busy that is with the rest of a prompt."""
    return min(NARROW_GBPS, wide.binding_gbps(TIMES))


@pytest.mark.skipif(zstd_module() is None, reason="needs the zstd extra")
def test_a_line_that_binds_is_coded_for_and_no_other(tmp_path: Path) -> None:
    wide, narrow, again = asyncio.run(measure("auto", (100.0, binding, 100.0), 2, tmp_path))
    assert [row.remote for row in (wide, narrow, again)] == [2, 2, 2]
    assert narrow.saved_share > 0.25
    assert max(wide.saved_share, again.saved_share) < narrow.saved_share / 2
