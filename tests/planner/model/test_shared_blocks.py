"""Prompts that share blocks, kept without the blocks' names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model.trace_files.blocks import leading_seen
from planner.model.trace_files.shared_blocks import SharedBlocks
from planner.model.workload import read_trace
from tests.planner.traces import MOONCAKE
from transport.control.settings import SettingsError

SIZE = 512


def named(paths):
    """Blocks are named by all that is before them, too."""
    known: dict[tuple[int, ...], int] = {}
    return [tuple(known.setdefault(path[: at + 1], len(known)) for at in range(len(path))) for path in paths]


def same_names(one, other):
    """Whether one renames the blocks of the other."""
    pairs = {pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)}
    return len(pairs) == len({left for left, _ in pairs}) == len({right for _, right in pairs})


@given(st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=12))
def test_names_that_are_made_up_are_equal_where_the_traces_are(paths):
    names = named(paths)
    assert same_names(names, SharedBlocks.of(names, SIZE).names())


def test_a_trace_shares_what_it_shared():
    trace = read_trace(MOONCAKE)
    found = SharedBlocks.of(trace.blocks, SIZE)
    assert list(leading_seen(found.names())) == list(leading_seen(trace.blocks))
    assert found.head(50).names() == found.names()[:50]


def test_its_json_form_is_read_again():
    found = SharedBlocks.of([(1, 2), (1, 2, 3), (4,)], SIZE)
    again = SharedBlocks.read(json.loads(json.dumps(found.table())), 3)
    assert again.names() == found.names() == [(0, 1), (0, 1, 2), (3,)]
    assert again.block_tokens == SIZE


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"source": [0, 2]}, "source"),
        ({"source": [0, -1]}, "source"),
        ({"source": [0]}, "source"),
        ({"shared": [0, 3]}, "shared"),
        ({"blocks": [2, 0.5]}, "blocks"),
        ({"block_tokens": 0}, "block_tokens"),
    ],
)
def test_what_cannot_be_is_named(change, name):
    table = SharedBlocks.of([(1, 2), (1, 2, 3)], SIZE).table() | change
    with pytest.raises(SettingsError, match=name):
        SharedBlocks.read(table, 2)
