"""A run's results and its time."""

import json
import time
from pathlib import Path

import pytest

from tests.gpu import __main__ as gpu
from tests.gpu.results import Report, TimeBudget, judged, skipped


def test_each_result_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out" / "gpu.json"
    report = Report("cpu", TimeBudget(9.0, time.monotonic()), path)
    report.add(judged("B", [], {"block": 16}, "llama"))
    assert [part["model"] for part in json.loads(path.read_text())["parts"]] == ["llama"]
    report.add(judged("D", ["other tokens"], {}))
    assert [part["outcome"] for part in json.loads(path.read_text())["parts"]] == ["passed", "failed"]
    assert report.has_failed


def test_what_is_skipped_has_not_failed() -> None:
    report = Report("cpu", TimeBudget(9.0, time.monotonic()))
    report.add(skipped("C", "needs vLLM"))
    assert not report.has_failed


def test_what_no_longer_fits_says_how_much_is_left() -> None:
    budget = TimeBudget(limit_s=570.0, began_s=100.0)
    assert budget.shortage(75.0, now=100.0 + 495.0) == ""
    assert budget.shortage(75.0, now=100.0 + 500.0) == "70 of 570 s are left, 75 are wanted"
    assert budget.left_s(now=9999.0) == 0.0


def test_a_part_whose_package_is_missing_names_it() -> None:
    def part() -> None:
        raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")

    assert gpu.whatever_it_lacks("A", part).reason == "needs the package msgspec"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), OSError("no room")])
def test_a_part_that_ends_has_failed(error: Exception) -> None:
    def part() -> None:
        raise error

    assert gpu.whatever_it_lacks("A", part).outcome == "failed"


def test_what_was_cut_off_has_failed_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    report = Report("cpu", TimeBudget(9.0, time.monotonic()), path)
    for name in ("llama", "qwen3_next"):
        report.awaits("B", name)
    report.add(judged("B", [], {}, "llama"))
    report.cut()
    assert [(part["model"], part["outcome"]) for part in json.loads(path.read_text())["parts"]] == [
        ("llama", "passed"),
        ("qwen3_next", "failed"),
    ]
    assert report.has_failed


@pytest.mark.parametrize("arguments", [["--parts", "b"], ["--parts", "A,E"], ["--limit-s", "0"], ["--limit-s", "nan"]])
def test_what_cannot_be_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
    assert arguments[1].split(",")[-1] in capsys.readouterr().err
