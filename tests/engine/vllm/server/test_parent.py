"""Real processes: what a killed server leaves behind ends by itself."""

import os
import select
import signal
import subprocess
import sys

import pytest

# A server that is about to be killed, and the engine that it started; the engine says its process id.
SERVER = """
import multiprocessing, os, signal, time

def engine(stubborn):
    from engine.vllm.server.parent import end_with_parent
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(grace_s=0.2)
    print(os.getpid(), flush=True)
    while True:
        time.sleep(60)

if __name__ == "__main__":
    multiprocessing.get_context("{method}").Process(target=engine, args=({stubborn},)).start()
    time.sleep(60)
"""


def started(folder, method: str, stubborn: bool) -> tuple[subprocess.Popen[str], int]:
    script = folder / "server.py"
    script.write_text(SERVER.format(method=method, stubborn=stubborn))
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    return server, int(server.stdout.readline())


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("stubborn", [False, True])
def test_an_engine_ends_when_its_server_is_killed(tmp_path, method: str, stubborn: bool) -> None:
    server, engine = started(tmp_path, method, stubborn)
    with server:
        pidfd = os.pidfd_open(engine)
        try:
            server.send_signal(signal.SIGKILL)
            assert select.select([pidfd], [], [], 30.0)[0], "the engine still runs"
        finally:
            os.close(pidfd)


def test_an_engine_in_its_servers_own_process_is_left_alone() -> None:
    code = (
        "import threading; from engine.vllm.server.parent import end_with_parent; "
        "end_with_parent(); print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
