"""Sessions of coding agents as requests that arrive."""

import json
from pathlib import Path

import numpy as np
import pytest

import prfaas
from planner.errors import InputError
from planner.model.sessions import read_sessions, replay
from planner.model.workload import infinite_cache_hits


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
