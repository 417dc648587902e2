"""Sessions of coding agents as requests that arrive."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import prfaas
from planner.errors import InputError
from planner.model.sessions import ClosedLoop, Turn, at_factor, in_virtual_time, read_sessions, replay, within
from planner.model.trace_files.categories import CategorySource, RequestCategories
from planner.model.traces import read_requests
from planner.model.workload import infinite_cache_hits, read_trace
from tests.planner.traces import MOONCAKE

SESSIONS = Path(prfaas.__file__).parent / "data" / "agent_sessions.jsonl"


def row(session, t, blocks, tokens):
    return {"session": session, "t": t, "input_length": tokens, "output_length": 5, "blocks": blocks}


def written(path, rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_blocks_of_equal_prefixes_have_one_name_and_partial_ones_their_own(tmp_path):
    rows = [row(1, 0.0, [[1, 16]], 1024), row(1, 9.0, [[1, 17]], 1100), row("1.1", 4.0, [[1, 8], [90, 8]], 1024)]
    (session,) = read_sessions(written(tmp_path / "s.jsonl", rows))
    first, sub_agent, later = (turn.blocks for turn in session)
    assert later[:2] == first
    assert later[2] not in first
    assert sub_agent[0] == first[0]
    assert sub_agent[1] != first[1]


def test_sessions_begin_by_seed_and_share_nothing(tmp_path):
    sessions = read_sessions(written(tmp_path / "s.jsonl", [row(1, 0.0, [[1, 8]], 512), row(1, 5.0, [[1, 16]], 1024)]))
    trace = replay(sessions, 4, 1000.0, seed=1)
    assert np.all(np.diff(trace.arrival_s) >= 0)
    assert infinite_cache_hits(trace).sum() == 512 * (len(trace) - 4)
    assert np.array_equal(trace.arrival_s, replay(sessions, 4, 1000.0, seed=1).arrival_s)


def test_a_line_that_is_no_request_is_named(tmp_path):
    with pytest.raises(InputError, match="line 2"):
        read_sessions(written(tmp_path / "s.jsonl", [row(1, 0.0, [], 3), {"session": 1}]))
    with pytest.raises(InputError, match="empty"):
        read_sessions(written(tmp_path / "none.jsonl", []))


def test_the_slice_that_is_shipped_is_read():
    sessions = read_sessions(Path(prfaas.__file__).parent / "data" / "agent_sessions.jsonl")
    assert (len(sessions), sum(map(len, sessions))) == (21, 991)


def turn(at_s, tokens=1024, agent="1", think_s=0.0):
    return Turn(at_s, tokens, 5, (0, 1), agent, think_s)


def test_a_later_turn_waits_for_the_answer_and_for_its_user():
    loop = ClosedLoop([(2.0, (turn(0.0), turn(9.0, think_s=3.0), turn(11.0, think_s=1.0)))], until_s=100.0)
    assert [call.at_s for call in in_virtual_time(loop, lambda turn: 0.5)] == [2.0, 5.5, 7.0]
    assert [call.at_s for call in in_virtual_time(loop, lambda turn: 40.0)] == [2.0, 45.0, 86.0]


def test_nothing_is_sent_after_the_end():
    loop = ClosedLoop([(2.0, (turn(0.0), turn(9.0, think_s=3.0))), (8.0, (turn(0.0),))], until_s=8.0)
    assert [call.at_s for call in in_virtual_time(loop, lambda turn: 0.5)] == [2.0, 5.5]
    assert [call.at_s for call in in_virtual_time(loop, lambda turn: 4.0)] == [2.0]


def test_a_sub_agent_begins_after_the_turn_that_asked_for_it_and_does_not_hold_it_up():
    session = (turn(0.0), turn(4.0, agent="1.1"), turn(6.0, agent="1.1", think_s=1.0), turn(7.0, think_s=2.0))
    loop = ClosedLoop([(0.0, session)], until_s=100.0)
    sent = [(call.at_s, call.turn.agent) for call in in_virtual_time(loop, lambda turn: 1.0)]
    assert sent == [(0.0, "1"), (3.0, "1"), (4.0, "1.1"), (6.0, "1.1")]
    assert [call.at_s for call in loop.answered(loop.first()[0], 0.0, 9.0)] == [9.0, 11.0]


def test_sessions_of_a_closed_loop_are_those_that_are_shipped(tmp_path):
    rows = [row(1, 0.0, [[1, 8]], 512) | {"think_time": 0.0}, row(1, 9.0, [[1, 16]], 1024) | {"think_time": 4.5}]
    (session,) = read_sessions(written(tmp_path / "s.jsonl", rows))
    assert [(each.agent, each.think_s) for each in session] == [("1", 0.0), ("1", 4.5)]


def test_a_session_ends_before_its_first_prompt_that_is_too_long():
    sessions = [(turn(0.0), turn(1.0, 5000), turn(2.0)), (turn(0.0, 5000),)]
    assert within(sessions, 4000) == [(sessions[0][0],)]


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


def test_copies_are_of_the_category_of_their_first(sessions):
    codes = (sessions.sessions % 3).astype(np.uint8)
    said = RequestCategories(("a", "b", "c"), codes, CategorySource.TRACE)
    more = at_factor(replace(sessions, categories=said), 1.7, 0)
    of_first = more.sessions % (1 + sessions.sessions.max())
    assert more.categories.codes.tolist() == (of_first % 3).tolist()
