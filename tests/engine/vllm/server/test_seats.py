"""Real sockets and processes: launches of one server meet, and what becomes the server has their ports."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.vllm.server.seats import (
    LISTENERS_VARIABLE,
    MEETING_PLACE,
    RankAtServer,
    RankPlace,
    Seat,
    SeatError,
    handed_over,
    meet,
    settings_of_rank,
    taken_over,
)

PATIENCE_S = 240.0  # of each wait: a busy machine takes a minute to start a process
KEEP = """
import sys
from pathlib import Path
from engine.vllm.server.seats import RankPlace, Seat, keep
place, rank, port = sys.argv[1:]
keep(Seat(Path(place), int(rank), 3), RankPlace(int(rank), f"/run/{rank}/engine.sock", "127.0.0.1", int(port)))
"""
SERVER = """
import os, time
from engine.vllm.server.seats import taken_over
(taken,) = taken_over(os.environ)
print(taken.getsockname()[1], flush=True)
time.sleep(600)
"""
BECOME = """
import os, sys
from pathlib import Path
from engine.vllm.server.seats import Seat, handed_over, meet
met = meet(Seat(Path(sys.argv[1]), 0, 2), 240.0)
os.execve(sys.executable, [sys.executable, "-c", sys.argv[2]], os.environ | handed_over(met))
"""


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[str]"]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.communicate()


def started(code: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})


def closed(met: list[RankAtServer]) -> list[str]:
    """The agents of all; what was opened for them is closed."""
    for each in met:
        each.listener.close()
        each.line.close()
    return [each.agent_socket for each in met]


def test_a_seat_is_handed_on_by_the_environment() -> None:
    seat = Seat(Path("/tmp/prfaas-x:y/server.sock"), 3, 8)
    assert Seat.of(seat.environment()) == seat
    assert Seat.of({}) is None


def test_launches_meet_in_the_order_of_their_ranks(tmp_path: Path, processes: list["subprocess.Popen[str]"]) -> None:
    place = tmp_path / MEETING_PLACE
    processes += [started(KEEP, place, 2, 0), started(KEEP, place, 1, 0)]
    met = meet(Seat(place, 0, 3), PATIENCE_S)
    assert met[0].http_url.startswith("http://127.0.0.1:")
    assert met[0].http_url != met[1].http_url
    assert closed(met) == ["/run/1/engine.sock", "/run/2/engine.sock"]
    again = meet(Seat(place, 0, 3), PATIENCE_S)  # a server has ended: they come to the next one by themselves
    assert closed(again) == ["/run/1/engine.sock", "/run/2/engine.sock"]


def test_one_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(SeatError, match=r"ranks \[1\] of this server have not come in time"):
        meet(Seat(tmp_path / MEETING_PLACE, 0, 2), 0.1)


def connected(place: Path) -> socket.socket:
    """A line, once there is something to connect to."""
    line, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + PATIENCE_S
    line.settimeout(PATIENCE_S)
    while line.connect_ex(str(place)):
        assert time.monotonic() < deadline, f"nothing at {place}"
        time.sleep(0.01)
    return line


def said(place: Path, *words: bytes) -> list[socket.socket]:
    """Connections that have said this."""
    lines = []
    for word in words:
        lines.append(connected(place))
        lines[-1].sendall(word + b"\n")
    return lines


def as_said(rank: int, name: str) -> bytes:
    return json.dumps({"rank": rank, "agent_socket": name, "host": "127.0.0.1", "port": 0}).encode()


@pytest.fixture
def meeting(tmp_path: Path) -> Callable[[], list[str]]:
    """Three ranks are to meet; what is called returns the agents that have."""
    met: list[RankAtServer] = []
    seat = Seat(tmp_path / MEETING_PLACE, 0, 3)
    thread = threading.Thread(target=lambda: met.extend(meet(seat, PATIENCE_S)), daemon=True)
    thread.start()

    def agents() -> list[str]:
        thread.join(PATIENCE_S)
        return closed(met)

    return agents


def test_what_is_no_rank_gets_no_seat_and_one_that_left_is_waited_for(
    tmp_path: Path, meeting: Callable[[], list[str]]
) -> None:
    place = tmp_path / MEETING_PLACE
    strangers = said(place, b"{", b"[1]", as_said(0, "first"), as_said(3, "fourth"))
    (gone,) = said(place, as_said(1, "gone"))
    gone.close()
    strangers += said(place, as_said(2, "second"), as_said(1, "back"))
    assert meeting() == ["back", "second"]
    for line in strangers:
        line.close()


def test_of_two_launches_of_a_rank_the_later_one_has_its_seat(tmp_path: Path, meeting: Callable[[], list[str]]) -> None:
    """The other hears of it at once, and not when all have met."""
    place = tmp_path / MEETING_PLACE
    earlier, later = said(place, as_said(1, "earlier"), as_said(1, "later"))
    assert earlier.recv(1) == b""
    (other,) = said(place, as_said(2, "second"))
    assert meeting() == ["later", "second"]
    for line in (earlier, later, other):
        line.close()


def test_a_rank_is_found_by_the_name_that_its_node_has(tmp_path: Path) -> None:
    """As rank 0 is: what a name stands for here may be an address that nothing else reaches."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as line:
        at = RankAtServer("s", "localhost", listener, line)
        assert at.http_url == f"http://localhost:{listener.getsockname()[1]}"
    with socket.socket() as line, socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert RankAtServer("s", "::1", listener, line).http_url == f"http://[::1]:{listener.getsockname()[1]}"


def test_a_rank_at_any_address_of_ipv6_is_asked_by_ipv4_too(
    tmp_path: Path, processes: list["subprocess.Popen[str]"]
) -> None:
    """As rank 0 is, whose port vLLM opens."""
    place = tmp_path / MEETING_PLACE
    everywhere = KEEP.replace("127.0.0.1", "::")
    processes += [started(everywhere, place, 1, 0), started(everywhere, place, 2, 0)]
    for rank in meet(Seat(place, 0, 3), PATIENCE_S):
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, rank.listener.getsockname()[1])).close()
        rank.listener.close()
        rank.line.close()


def test_a_port_that_another_has_is_named(tmp_path: Path, processes: list["subprocess.Popen[str]"]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = tmp_path / MEETING_PLACE
        processes += [started(KEEP, place, 1, port), started(KEEP, place, 2, 0)]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}, where rank 1 is to be asked"):
            meet(Seat(place, 0, 3), PATIENCE_S)


def test_what_a_launch_becomes_has_the_ports_and_others_hear_when_it_ends(
    tmp_path: Path, processes: list["subprocess.Popen[str]"]
) -> None:
    place = tmp_path / MEETING_PLACE
    server = started(BECOME, place, SERVER)
    processes.append(server)
    (line,) = said(place, as_said(1, "s"))
    assert server.stdout is not None
    port = int(server.stdout.readline())
    socket.create_connection(("127.0.0.1", port), timeout=10.0).close()
    line.settimeout(0.2)
    with pytest.raises(TimeoutError):  # it runs
        line.recv(1)
    server.send_signal(signal.SIGKILL)
    line.settimeout(PATIENCE_S)
    assert line.recv(1) == b""
    line.close()


def test_sockets_are_found_again_by_what_the_environment_says() -> None:
    assert taken_over({}) == []
    assert handed_over([]) == {}
    near, far = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    environment = handed_over([RankAtServer("s", "127.0.0.1", listener, near)])
    assert environment == {LISTENERS_VARIABLE: str(listener.fileno())}
    assert os.get_inheritable(listener.fileno())
    os.set_inheritable(near.fileno(), False)
    (found,) = taken_over({LISTENERS_VARIABLE: str(os.dup(listener.fileno()))})
    assert found.getsockname()[1] == port
    for each in (near, far, listener, found):
        each.close()


def test_each_rank_reads_what_is_said_of_its_own_node() -> None:
    alone = {"agent_socket": "a", "http_url": "u"}
    assert settings_of_rank(alone, 0) == settings_of_rank(alone, 5) == alone, "a rank of the external kind"
    shared = {**alone, "other_ranks": [{"agent_socket": "b", "http_url": "v"}]}
    assert settings_of_rank(shared, 0)["agent_socket"] == "a"
    assert settings_of_rank(shared, 1) == {"agent_socket": "b", "http_url": "v"}
    with pytest.raises(ValueError, match="data parallel rank 2: 2 nodes share this server"):
        settings_of_rank(shared, 2)


def test_a_place_is_an_agent_and_a_port() -> None:
    assert RankPlace(1, "s", "::1", 0).rank == 1
