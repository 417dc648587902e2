"""The example of an engine that moves its KVCache by batches does what its text says."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_engines_move_kvcache() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "outside_engine.py"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["written: 20 pages of 65536 bytes, all equal", "read: 1 page, equal"]
