"""The comparison to the byte tells runs apart."""

from pathlib import Path

from benchmarks.planner.equality import WAYS, lines_of


def test_a_run_is_the_same_again_and_other_requests_are_told_apart(tmp_path: Path):
    rows = [f'{{"timestamp": {at * 400}, "input_length": 9000, "output_length": 50}}' for at in range(60)]
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(rows))
    lines = lines_of(path, 40)
    assert len(lines) == len(WAYS)
    assert lines_of(path, 40) == lines
    path.write_text("\n".join(rows).replace("9000", "9001"))
    assert not set(lines_of(path, 40)) & set(lines)
