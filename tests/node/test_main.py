"""The node as a process: how it starts, how it says why it does not, how it ends."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from node.config import LISTENERS, NodeConfig
from node.errors import NodeConfigError
from node.main import check_model, doubts_about_identity, say
from pd_cluster.__main__ import main
from tests.node.running import config
from tests.transport.path.ports import free_port
from transport.control.certificates import Authority
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.peers.name import PeerName, PeerRole

pytestmark = [pytest.mark.long, pytest.mark.turns]

FILES = {"certificate": "d0.pem", "key": "d0.key", "authority": "authority.pem", "revoked": "revoked"}
TABLE = """[node]
node_id = "{name}"
cluster = "c"
cluster_kind = "pd"
role = "decode"
model = "llama"
engine = "emulated"
cache_bytes = 4194304
run_dir = "{run_dir}"
drain_timeout_s = {drain_s}
{more}
"""


def config_file(tmp_path: Path, name: str = "main", more: str = "", drain_s: float = 5.0) -> str:
    path = tmp_path / "node.toml"
    path.write_text(TABLE.format(name=name, run_dir=tmp_path, more=more, drain_s=drain_s))
    return str(path)


@contextmanager
def node(tmp_path: Path, drain_s: float = 5.0) -> Iterator[subprocess.Popen[str]]:
    name = f"main{time.monotonic_ns()}"
    command = [sys.executable, "-m", "pd_cluster", "-c", config_file(tmp_path, name, drain_s=drain_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
    assert not list(Path("/dev/shm").glob(f"prfaas-{name}-*"))


def free_ports(count: int) -> list[int]:
    """Ports without a listener right now, which no connection is given meanwhile."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return [*ports]


def said(process: subprocess.Popen[str], prefix: str) -> str:
    """The first line that begins so."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith(prefix):
            return line
    raise AssertionError(f"it never said {prefix!r}")


@pytest.mark.parametrize("when", ["node listening", "node ready"])
def test_sigterm_ends_it_and_its_engine(tmp_path: Path, when: str) -> None:
    """With a running engine, and with one that is still starting."""
    with node(tmp_path) as process:
        said(process, when)
        (engine,) = _children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


def test_a_second_sigterm_waits_for_nobody(tmp_path: Path) -> None:
    """Not for a reservation that is never claimed, either."""
    with node(tmp_path, drain_s=3600.0) as process:
        address = re.search(r"agent=(\S+)", said(process, "node listening"))
        said(process, "node ready")
        assert address is not None
        with grpc.insecure_channel(address[1]) as channel:
            stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
            stub.Reserve(pb.ReserveRequest(num_tokens=64, prefix_only=True), timeout=60.0)
            process.send_signal(signal.SIGTERM)
            while stub.Describe(pb.DescribeRequest(), timeout=60.0).state != pb.NODE_STATE_DRAINING:
                assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    while not found:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


@pytest.mark.parametrize("key", ["control_port", "calls_port", "transfer_port", "engine_port", "metrics_port"])
def test_a_port_in_use_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = config_file(tmp_path, more=f"{key} = {port}")
        assert main(["-c", path]) == 2
    refusal = f"node main: cannot start: {key} = {port}: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert refusal in capsys.readouterr().err


def test_a_node_that_was_killed_comes_back_on_its_ports(tmp_path: Path) -> None:
    ports = free_ports(len(LISTENERS))
    more = "\n".join(f"{key}_port = {port}" for key, port in zip(LISTENERS, ports, strict=True))
    command = [sys.executable, "-m", "pd_cluster", "-c", config_file(tmp_path, f"main{time.monotonic_ns()}", more)]
    for end in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                said(process, "node ready")
            finally:
                process.send_signal(end)
            assert process.wait(60.0) == (-signal.SIGKILL if end is signal.SIGKILL else 0)


def test_a_node_says_where_it_takes_picked_requests(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    more = f"picked_port = {port}"
    command = [sys.executable, "-m", "pd_cluster", "-c", config_file(tmp_path, f"main{time.monotonic_ns()}", more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert f" picked=http://127.0.0.1:{port}\n" in said(process, "node listening")
            said(process, "node ready")
            socket.create_connection(("127.0.0.1", port), 60.0).close()
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0


def test_a_node_whose_engine_is_given_up_ends_so_that_it_is_started_again(tmp_path: Path) -> None:
    name = f"main{time.monotonic_ns()}"
    command = [sys.executable, "-m", "pd_cluster", "-c", config_file(tmp_path, name, "engine_max_restarts = 0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said(process, "node ready")
            (engine,) = _children(process.pid)
            os.kill(engine, signal.SIGKILL)
            _, errors = process.communicate(timeout=60.0)
        finally:
            process.kill()
    assert process.returncode == 3
    assert f"node {name}: its engine died too often: the node drains, and ends; end of " in errors
    assert not list(Path("/dev/shm").glob(f"prfaas-{name}-*"))


def test_a_full_disk_under_their_logs_ends_neither_node_nor_engine(tmp_path: Path) -> None:
    name, (port,) = f"main{time.monotonic_ns()}", free_ports(1)
    (tmp_path / f"{name}-engine.log").symlink_to("/dev/full")
    command = [
        sys.executable,
        "-u",
        "-m",
        "pd_cluster",
        "-c",
        config_file(tmp_path, name, f"control_port = {port}\nengine_max_restarts = 0"),
    ]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stdout=full, stderr=full) as process:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
                grpc.channel_ready_future(channel).result(timeout=60.0)
                deadline = time.monotonic() + 60.0
                while (found := stub.Describe(pb.DescribeRequest())).state != pb.NODE_STATE_READY:
                    assert time.monotonic() < deadline, found.state
                    time.sleep(0.02)
                with urllib.request.urlopen(f"{found.engine_url}/health", timeout=60.0) as answer:
                    assert answer.status == 200
            process.terminate()
            assert process.wait(60.0) == 0
        finally:
            process.kill()


def test_every_port_has_an_address_of_its_own(tmp_path: Path) -> None:
    own = [listener for listener in LISTENERS if listener != "calls"]  # which are taken where control is
    hosts = {listener: f"127.0.0.{number}" for number, listener in enumerate(own, 2)}
    (number,) = free_ports(1)  # one for all: they do not meet
    more = "\n".join(f'{name}_host = "{host}"\n{name}_port = {number}' for name, host in hosts.items())
    command = [sys.executable, "-m", "pd_cluster", "-c", config_file(tmp_path, f"main{time.monotonic_ns()}", more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            listening = said(process, "node listening")
            ready = said(process, "node ready")
            for host in hosts.values():
                socket.create_connection((host, number), 60.0).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", number), 60.0)
        finally:
            process.send_signal(signal.SIGTERM)
    assert f"agent={hosts['control']}:{number} metrics=http://{hosts['metrics']}:{number}" in listening
    assert f"engine=http://{hosts['engine']}:{number}" in ready


def test_memory_that_is_not_there_is_said_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(config_file(tmp_path))
    path.write_text(path.read_text().replace("4194304", str(1 << 49)))
    assert main(["-c", str(path)]) == 2
    assert f"cannot start: cache_bytes = {1 << 49}: /dev/shm has " in capsys.readouterr().err


def test_a_hang_up_signal_changes_budgets_and_says_so(tmp_path: Path) -> None:
    with node(tmp_path) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        metrics = line.rpartition("metrics=")[2].strip()

        def reloaded(outcome: str) -> bool:
            with urllib.request.urlopen(f"{metrics}/metrics", timeout=10) as answer:
                return f'prfaas_config_reloads_total{{cluster="c",outcome="{outcome}"}} 1.0' in answer.read().decode()

        path = tmp_path / "node.toml"
        text = path.read_text()
        for more, outcome in (("", "unchanged"), ("egress_bytes_per_s = -1", "refused"), ("threads = 1", "applied")):
            path.write_text(text + more + ("\n[node.egress_bytes_per_s]\nwest = 5e6\n" if outcome == "applied" else ""))
            process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + 60.0
            while not reloaded(outcome):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0


def test_hardware_that_no_profile_knows_is_said_at_once(tmp_path: Path) -> None:
    values = {"node_id": "n", "cluster": "west", "cluster_kind": "pd", "role": "decode", "engine": "emulated"}
    missing = NodeConfig(**values, model=str(tmp_path / "h300x8.json"))
    with pytest.raises(NodeConfigError, match="h300x8"):
        check_model(missing)


def test_an_architecture_may_have_the_name_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "kimi_linear").mkdir()
    values = {"node_id": "n", "cluster": "west", "cluster_kind": "pd", "role": "decode", "engine": "emulated"}
    with chdir(tmp_path):  # where its command is typed
        check_model(NodeConfig(**values, model="kimi_linear"))


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = "certificate = 'n.pem'\nkey = 'n.key'\nauthority = 'ca.pem'"
    assert main(["-c", config_file(tmp_path, more=keys)]) == 2
    assert f"certificate {tmp_path}/n.pem with key {tmp_path}/n.key: no such file" in capsys.readouterr().err


def test_an_engine_that_cannot_work_ends_the_node_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-c", config_file(tmp_path, more="block_size = 8192\nchunk_tokens = 8192")]) == 2
    assert "its engine cannot serve: no arena for llama with cache_bytes = 4194304" in capsys.readouterr().err


def test_a_certificate_that_peers_will_refuse_is_told_of(tmp_path: Path) -> None:
    peer = PeerName("prfaas", "west", PeerRole.NODE, "d0")
    authority = Authority(tmp_path)
    (tmp_path / "revoked").touch()
    files = {name: str(tmp_path / file) for name, file in FILES.items()}
    node = config(tmp_path, node_id="d0", cluster="west", **files)
    authority.issue("d0", peer=peer)
    now_s = datetime.now(UTC).timestamp()
    assert doubts_about_identity(node, now_s) == ""
    (tmp_path / "revoked").write_text("d0\n")
    assert "is on the list" in doubts_about_identity(node, now_s)
    assert "has expired" in doubts_about_identity(node, now_s + 400 * 86400)
    assert doubts_about_identity(config(tmp_path), now_s) == ""


class _Pieces(io.StringIO):
    """What is written, as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def write(self, text: str, /) -> int:
        self.found.append(text)
        return len(text)


def test_a_line_is_written_in_one_piece() -> None:
    """Ranks share an output, and Python buffers nothing in our image: lines of two would mix."""
    say("node ready", to=(output := _Pieces()))
    assert [text for text in output.found if text] == ["node ready\n"]
