"""Traces at other rates."""

from pathlib import Path

import numpy as np
import pytest

import prfaas
from planner.model.more_sessions import at_factor
from planner.model.traces import read_requests
from planner.model.workload import infinite_cache_hits, read_trace
from tests.planner.traces import MOONCAKE

SESSIONS = Path(prfaas.__file__).parent / "data" / "agent_sessions.jsonl"


@pytest.fixture(scope="module")
def sessions():
    return read_requests(SESSIONS, 600.0)


def test_requests_of_a_trace_come_faster():
    trace = read_trace(MOONCAKE)
    assert at_factor(trace, 2.0, 0).span_s == pytest.approx(trace.span_s / 2)


def test_at_their_own_rate_sessions_are_as_they_were(sessions):
    same = at_factor(sessions, 1.0, 0)
    assert np.array_equal(same.arrival_s, sessions.arrival_s)
    assert list(same.blocks) == list(sessions.blocks)


@pytest.mark.parametrize("factor", [0.3, 1.7, 4.0])
def test_there_are_more_sessions_each_as_fast_as_it_was(sessions, factor):
    more = at_factor(sessions, factor, 0)
    assert len(more) == pytest.approx(factor * len(sessions), rel=0.15)
    assert more.arrival_s[-1] <= sessions.arrival_s[-1]
    assert np.all(np.diff(more.arrival_s) >= 0)
    for number in np.unique(more.sessions):
        own = more.sessions == number
        first = more.arrival_s[own][0]
        template = sessions.sessions == number % (1 + sessions.sessions.max())
        offsets = sessions.arrival_s[template] - sessions.arrival_s[template][0]
        assert more.arrival_s[own] - first == pytest.approx(offsets[: own.sum()])


def test_copies_share_no_blocks(sessions):
    twice = at_factor(sessions, 2.0, 0)
    copies = twice.sessions > sessions.sessions.max()
    of_copies = {block for blocks, is_copy in zip(twice.blocks, copies, strict=True) if is_copy for block in blocks}
    of_first = {block for blocks, is_copy in zip(twice.blocks, copies, strict=True) if not is_copy for block in blocks}
    assert of_copies
    assert not of_copies & of_first
    assert infinite_cache_hits(twice).sum() > 1.5 * infinite_cache_hits(sessions).sum()
