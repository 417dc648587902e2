"""Real processes, spawned as vLLM spawns its own: how they end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A server that starts an engine and says with which status that ended. What the engine says when it is taken apart is the sign
# that it was: `Apart` hangs on a module, which goes last of all.
SERVER = """
import multiprocessing, sys, threading, time

class Apart:
    def __del__(self):
        print("taken apart", flush=True)

def engine(how):
    import math
    from engine.vllm.server.leaving import leave_at_once
    math.apart = Apart()
    words, closed = ["last word"], threading.Event()
    def send():
        closed.wait()
        time.sleep(0.2)
        print(words[0], flush=True)
        words.clear()
    threading.Thread(target=send, daemon=True).start()
    try:
        if how == "failed":
            raise ValueError("how it failed")
        if how == "told":
            sys.exit(0)
    finally:
        leave_at_once(lambda: bool(words))
        print("closed")
        if how == "failed later":  # vLLM takes more down once its connector is closed
            raise ValueError("how it failed")
        if how == "refused later":
            sys.exit(3)
        if how != "failed":  # which waits for no word
            closed.set()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(sys.argv[1],))
    process.start()
    process.join()
    print("status", process.exitcode)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("returned", ["closed", "last word", "status 0"]),
        ("told", ["closed", "last word", "status 0"]),
        ("failed", ["closed", "status 1", "taken apart"]),
        ("failed later", ["closed", "status 1", "taken apart"]),
        ("refused later", ["closed", "status 3", "taken apart"]),
    ],
)
def test_it_is_not_taken_apart_once_it_has_ended_in_order(tmp_path: Path, how: str, said: list[str]) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, str(script), how], env=environment, capture_output=True, text=True, timeout=240
    )
    assert sorted(ended.stdout.splitlines()) == said
    assert ("how it failed" in ended.stderr) == (how in ("failed", "failed later"))
