"""Columns of a trace while it is read: names of any length, shapes of other traces, and units that are mixed up."""

import json

import numpy as np
import pytest

from planner.errors import InputError
from planner.model.trace_files.blocks import BlockColumn, leading_seen
from planner.model.trace_files.rows import parsed, quickly_parsed
from planner.model.workload import infinite_cache_hits, read_trace
from tests.planner.commands.inputs import ROWS, jsonl

PROMPTS = ((0, 1, 2), (), (0, 1, 3), (0, 9, 2), (0, 1, 2, 3))


def names_of(prompts):
    column = BlockColumn()
    for names in prompts:
        column.append(names)
    return column.ordered(np.arange(len(prompts)))


@pytest.mark.parametrize("offset", [0, 1 << 20, 1 << 40, 1 << 200])
def test_names_of_any_length_are_kept_and_found_again(offset):
    prompts = tuple(tuple(name + offset for name in names) for names in PROMPTS)
    blocks = names_of(prompts)
    assert blocks == prompts
    assert (blocks[-1], blocks[1:3]) == (prompts[-1], prompts[1:3])
    assert list(leading_seen(blocks)) == list(leading_seen(prompts)) == [0, 0, 2, 1, 4]


def test_a_column_widens_where_a_name_is_longer():
    prompts = ((1,), (1 << 40, 2), (1 << 200, 1 << 40, 1), (1 << 200,))
    assert names_of(prompts) == prompts


def test_requests_are_sorted_with_their_blocks(tmp_path):
    (tmp_path / "t.jsonl").write_text(jsonl(ROWS[::-1]))
    trace = read_trace(tmp_path / "t.jsonl")
    assert trace.blocks == [tuple(row["hash_ids"]) for row in ROWS]
    assert trace.prompt_tokens.tolist() == [row["input_length"] for row in ROWS]
    assert not infinite_cache_hits(trace).any()


BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_burstgpt(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        f"{BURST}5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n47,GPT-4,20,40,60,API log\n"
    )
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == [0, 40.5, 42]
    assert trace.prompt_tokens.tolist() == [472, 1087, 20]
    assert trace.output_tokens.tolist() == [18, 29, 40]  # the second one failed, and would have had an answer
    path.write_text(f"{BURST}5,ChatGPT,many,18,490,Conversation log\n")
    with pytest.raises(InputError, match="row 1: Request tokens = 'many'"):
        read_trace(path)


def test_milliseconds_read_as_seconds_are_refused(tmp_path):
    path = tmp_path / "qwen.jsonl"
    rows = [{"chat_id": at, "timestamp": 1000 * at, "input_length": 10, "output_length": 5} for at in range(200)]
    path.write_text(jsonl(rows))
    with pytest.raises(
        InputError, match="all at whole seconds: timestamp is read as seconds; if it is in milliseconds"
    ):
        read_trace(path)
    path.write_text(jsonl([row | {"timestamp": row["timestamp"] / 1000} for row in rows]))
    assert read_trace(path).span_s == 199


def test_few_requests_at_whole_seconds_are_read_where_their_unit_is_known(tmp_path):
    """Those of one model in BurstGPT's trace, one every ten minutes."""
    path = tmp_path / "burst.csv"
    path.write_text(BURST + "".join(f"{600 * at},GPT-4,20,40,60,API log\n" for at in range(200)))
    assert read_trace(path).span_s == 600 * 199


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 3000, "input_length": 10, "output_length": 5, "hash_ids": [1, 2]}',
        ' {"hash_ids": [], "output_length": 5.0, "input_length": 1e3, "timestamp": 0.5} ',
        '{"timestamp": 1, "input_length": 10, "output_length": 5}',
        '{"timestamp": 1, "input_length": 10, "output_length": 5, "hash_ids": [' + str((1 << 256) - 1) + "]}",
    ],
)  # fmt: skip
def test_mooncakes_rows_are_read_quickly(line):
    assert quickly_parsed(line) == parsed(json.loads(line))


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 1, "input_length": 10, "output_length": 5, "chat_id": 1}',
        '{"timestamp": 1, "input_length": 10, "output_length": 5, "block_tokens": 64}',
        '{"timestamp": NaN, "input_length": 10, "output_length": 5}',
        '{"timestamp": 1, "input_length": true, "output_length": 5}',
        '{"timestamp": 1, "input_length": 1e10, "output_length": 5}',
        '{"timestamp": 1, "input_length": 1e-13, "output_length": 5}',
        '{"timestamp": 1, "input_length": -1, "output_length": 5}',
        '{"timestamp": 1, "input_length": 1, "output_length": 5, "hash_ids": null}',
        '{"timestamp": 1, "input_length": 1, "output_length": 5, "hash_ids": [-1]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 5, "hash_ids": [1.0]}',
        '{"timestamp": 1, "input_length": 1, "output_length": 5, "hash_ids": [' + str(1 << 256) + "]}",
        '{"timestamp": 1, "input_length": 1, "outp',
        "[" * 100_000,
    ],
)  # fmt: skip
def test_every_other_row_is_left_to_the_slow_reader(line):
    assert quickly_parsed(line) is None


def test_an_odd_row_among_mooncakes_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl(ROWS) + "\n" + jsonl([ROWS[0] | {"input_length": "x"}]))
    with pytest.raises(InputError, match=f"row {len(ROWS) + 2}: input_length = 'x'"):
        read_trace(path)
    path.write_text(jsonl([ROWS[0], ROWS[1] | {"note": 1}, *ROWS[2:]]))
    assert read_trace(path).prompt_tokens.tolist() == [row["input_length"] for row in ROWS]
