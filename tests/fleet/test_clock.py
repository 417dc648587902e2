"""A process whose time of day is wrong still calls others: only the time that it would show is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet.clock import set_clock

ASKS = """
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

server = grpc.server(ThreadPoolExecutor(1))
methods = {"Say": grpc.unary_unary_rpc_method_handler(lambda asked, _: asked)}
server.add_registered_method_handlers("Echo", methods)
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Echo", methods)])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    said = channel.unary_unary("/Echo/Say")(b"there", timeout=10.0)
print(said.decode(), round(time.time()))
server.stop(None)
"""


@pytest.mark.parametrize("wrong_by_s", [-3.15e7, 3.15e7])
def test_calls_keep_their_deadlines_while_the_time_of_day_is_wrong_by_a_year(tmp_path: Path, wrong_by_s: float) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    set_clock(tmp_path / "clock", wrong_by_s)
    command = [sys.executable, "-m", "tests.fleet.clock", str(tmp_path / "clock"), "asks"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])}
    began = round(tmp_path.stat().st_mtime)
    said, shown = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60.0).stdout.split()
    assert said == b"there"
    assert abs(int(shown) - began - wrong_by_s) < 60
