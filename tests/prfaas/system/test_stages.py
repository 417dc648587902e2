"""What a user who starts an engine is told meanwhile."""

from pathlib import Path

from prfaas.system.stages import EVERY_S, Progress, stage_of


def test_the_last_stage_counts() -> None:
    assert stage_of("") == "starts"
    assert stage_of("INFO Starting to load model x\nINFO Initializing a V1 LLM engine\n") == "loads weights"
    assert stage_of("Model loading took 3 GiB\nCapturing CUDA graphs") == "captures CUDA graphs"
    assert stage_of("Load weight begin. avail mem=14 GB\nLoad weight end. elapsed=0.17 s") == "has its weights"


def test_new_stages_are_told_at_once_and_that_it_goes_on_now_and_then(tmp_path: Path) -> None:
    told: list[str] = []
    log, now = tmp_path / "d0-engine.log", 100.0
    progress = Progress("d0", log, told.append, lambda: now)
    progress.look()
    assert told == []
    log.write_text("Starting to load model")
    now += 3
    progress.look()
    progress.look()
    now += EVERY_S
    progress.look()
    assert told == ["  d0            3 s: its engine loads weights", "  d0           18 s: its engine loads weights"]
