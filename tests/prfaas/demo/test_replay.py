from pathlib import Path

import numpy as np
import pytest

from prfaas.demo.replay import TraceRow, block_text, prompt_text, read_rows, scaled


def test_equal_ids_have_equal_text_and_others_do_not() -> None:
    assert block_text(7, 32) == block_text(7, 32) != block_text(8, 32)
    assert len(block_text(7, 32)) == 32


def test_prompts_share_the_prefix_that_the_trace_shares() -> None:
    one, two = prompt_text([0, 1, 2], 90, 32), prompt_text([0, 1, 3], 96, 32)
    assert len(one) == 90
    assert one[:64] == two[:64]
    assert one[64:90] != two[64:90]


def test_the_shipped_slice_is_what_its_readme_says() -> None:
    rows = read_rows()
    seen: set[int] = set()
    hits = 0
    for row in rows:
        assert len(row.hash_ids) == -(-row.input_length // 512)
        hits += next((i for i, block in enumerate(row.hash_ids) if block not in seen), len(row.hash_ids))
        seen.update(row.hash_ids)
    blocks = sum(len(row.hash_ids) for row in rows)
    assert len(rows) == 110
    assert round(100 * hits / blocks, 1) == 41.7
    assert round(sum(row.input_length for row in rows) / len(rows)) == 12014


def test_lengths_and_times_are_scaled_and_ordered() -> None:
    rows = [
        TraceRow(timestamp_ms=3000, input_length=513, output_length=8, hash_ids=(0, 1)),
        TraceRow(timestamp_ms=0, input_length=512, output_length=160, hash_ids=(0,)),
    ]
    requests = scaled(rows, 16, 10.0, np.random.default_rng(1))
    assert [(r.name, len(r.prompt), r.max_tokens) for r in requests] == [("conv-001", 32, 10), ("conv-000", 33, 1)]
    assert 0 <= requests[0].at_s < 0.3 <= requests[1].at_s < 0.6


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl:1: not a trace row"):
        read_rows(path)
