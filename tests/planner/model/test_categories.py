"""Categories of requests: as a trace says them, or first and later turns by what prompts have in common."""

import numpy as np
import pytest

from planner.errors import InputError
from planner.model.trace_files.blocks import BlockColumn
from planner.model.trace_files.categories import (
    MOST_CATEGORIES,
    CategoryColumn,
    CategorySource,
    RequestCategories,
    category_of,
)
from planner.model.workload import read_trace
from tests.planner.commands.inputs import ROWS, jsonl


def said(names):
    column = CategoryColumn()
    for name in names:
        column.append(name)
    found = column.ordered(np.arange(len(names)))
    return None if found is None else [found.names[code] for code in found.codes]


def test_a_type_goes_before_a_turn():
    assert category_of({"type": "text", "turn": 3}) == category_of({"category": "text"}) == "text"
    assert category_of({"turn": 1}) == "first turn"
    assert category_of({"type": None, "turn": 3}) == "later turns"
    assert category_of({"timestamp": 1}) is None


def test_categories_are_told_apart_up_to_a_bound():
    assert said([None, "api", "text", "api"]) == ["not said", "api", "text", "api"]
    assert said([None, None]) is None
    many = said([f"kind {at}" for at in range(100)])
    assert len(set(many)) == MOST_CATEGORIES - 1  # all but "not said"
    assert many[-1] == "others"


def test_a_trace_has_categories_in_order_of_its_requests(tmp_path):
    path = tmp_path / "qwen.jsonl"
    row = {"chat_id": 0, "input_length": 10, "output_length": 5, "hash_ids": [1], "turn": 1}
    kinds = ("file", "api", "file", None)
    path.write_text(jsonl([row | {"timestamp": 9 - at, "type": kind} for at, kind in enumerate(kinds)]))
    trace = read_trace(path)
    assert [trace.categories.names[code] for code in trace.categories.codes] == ["first turn", "file", "api", "file"]
    assert len(trace.head(2).categories.codes) == 2
    assert trace.categories.source is CategorySource.TRACE
    path.write_text(jsonl(ROWS))
    assert read_trace(path).categories is None


@pytest.mark.parametrize(("key", "value"), [("type", 3), ("type", ""), ("category", "x" * 65), ("turn", 0)])
def test_a_category_that_is_none_is_refused_by_name(tmp_path, key, value):
    path = tmp_path / "qwen.jsonl"
    path.write_text(jsonl([{"chat_id": 0, "timestamp": 1, "input_length": 10, "output_length": 5, key: value}]))
    with pytest.raises(InputError, match=f"row 1: {key} = "):
        read_trace(path)


CONVERSATIONS = (
    ((0, 1, 2), 0),  # begins
    ((0, 1, 3, 4), 1),  # goes on: the partial block 2 has changed
    ((0, 5), 0),  # another one, with the same system prompt
    ((0, 5), 1),  # the same prompt again
    ((0, 6, 7), 1),  # looks like the next turn of the one before it: a prompt of two blocks leaves one
    ((0, 1, 3), 0),  # shorter than the prompt that it shares all with
    ((0, 1, 3, 8), 1),
    ((0, 1, 9, 10), 0),  # branches off before the end
    ((11,), 0),
    ((11, 12), 0),  # a prompt of one block has no later turn
    ((), 0),
)


@pytest.mark.parametrize("offset", [0, 1 << 40, 1 << 200])
def test_turns_are_inferred_from_prompts(offset):
    column = BlockColumn()
    for names, _ in CONVERSATIONS:
        column.append(tuple(name + offset for name in names))
    blocks = column.ordered(np.arange(len(CONVERSATIONS)))
    expected = [later for _, later in CONVERSATIONS]
    assert RequestCategories.inferred(blocks).codes.tolist() == expected
    assert RequestCategories.inferred(tuple(blocks)).codes.tolist() == expected
