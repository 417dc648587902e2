"""Several engines from one node's file."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig
from prfaas.cli import main
from prfaas.errors import StartRefused
from prfaas.system.ranks import DEVICES, RankPlan, rank_plans, run_ranks

PATIENCE_S = 120.0


def config(**changes: Any) -> NodeConfig:
    values: dict[str, Any] = {
        "node_id": "big", "cluster": "c", "cluster_kind": "pd", "role": "decode", "model": "kimi_linear",
        "engine": "emulated",
    }  # fmt: skip
    return NodeConfig(**(values | changes))


def plans(
    count: int = 2, first: int = 0, environment: Mapping[str, str] | None = None, **changes: Any
) -> list[RankPlan]:
    return rank_plans(config(**changes), count, first, environment or {}, lambda: 4711)


def test_each_rank_is_a_node_with_ports_of_its_own() -> None:
    found = plans(control_port=7001, engine_port=7201, transfer_advertise="203.0.113.7:7101", control_advertise="host")
    assert [each.node_id for each in found] == ["big-0", "big-1"]
    assert found[1].flags == (
        "--node-id", "big-1", "--control-port", "7002", "--engine-port", "7202", "--transfer-advertise",
        "203.0.113.7:7102", "--ranks", "1",
    )  # fmt: skip
    assert found[1].command(["node", "-c", "f.toml", "--ranks", "2"], ["--dtype", "auto"])[-3:] == [
        "--",
        "--dtype",
        "auto",
    ]


def test_ranks_of_experts_are_one_group() -> None:
    first, second = plans(engine_args=("--data_parallel_size=2",))
    group = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "4711", "--data-parallel-rank")
    assert first.engine_flags == (*group, "0")
    assert second.engine_flags == (*group, "1")
    elsewhere = ("-dp", "16", "-dpa", "10.0.0.1", "-dpp", "5000")
    third, _ = plans(first=8, engine_args=elsewhere)
    assert third.node_id == "big-8"
    assert third.engine_flags == ("--data-parallel-rank", "8")


def test_engines_without_a_group_get_no_flags_and_equal_parts_of_the_devices() -> None:
    found = plans(environment={DEVICES: "0,1,2,3"})
    assert [each.engine_flags for each in found] == [(), ()]
    assert [each.environment for each in found] == [{DEVICES: "0,1"}, {DEVICES: "2,3"}]
    assert plans()[0].environment == {}


def test_each_rank_has_a_certificate_of_its_own() -> None:
    files = {"certificate": "c-{rank}.pem", "key": "k-{rank}.pem", "authority": "a.pem"}
    assert "c-1.pem" in plans(**files)[1].flags
    assert "k-1.pem" in plans(**files)[1].flags
    with pytest.raises(StartRefused, match=r"certificate = 'c.pem'.*\{rank\}"):
        plans(**{**files, "certificate": "c.pem"})


@pytest.mark.parametrize(
    ("engine_args", "environment", "said"),
    [
        (("--data-parallel-size", "1"), {}, "need at least 2"),
        (("-dp", "4"), {}, "--data-parallel-address"),
        (("-dp", "2", "--data-parallel-rank", "0"), {}, "--data-parallel-rank"),
        ((), {DEVICES: "0,1,2"}, "3 devices"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    engine_args: tuple[str, ...], environment: Mapping[str, str], said: str
) -> None:
    with pytest.raises(StartRefused, match=said):
        plans(environment=environment, engine_args=engine_args)


def test_ports_that_two_ranks_would_share_are_named() -> None:
    with pytest.raises(StartRefused, match=r"transfer_port = 7002 .*control_port = 7001"):
        plans(control_port=7001, transfer_port=7002)
    with pytest.raises(StartRefused, match=r"control_port = 65535"):
        plans(control_port=65535)
    assert len(plans(3, control_port=7001, transfer_port=7004)) == 3


def test_ranks_that_are_told_to_end_before_they_listen_to_it_have_not_failed() -> None:
    """What stops a service while it starts would call it failed."""

    async def scenario() -> int:
        async with asyncio.timeout(20.0):
            running = asyncio.create_task(run_ranks(plans(), [["sleep", "600"]] * 2, 0.0, print))
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            return await running

    assert asyncio.run(scenario()) == 0


def start(tmp_path: Path) -> "subprocess.Popen[str]":
    command = [
        sys.executable, "-m", "prfaas", "node", "--engine", "emulated", "--model", "kimi_linear", "--ranks", "2",
        "--node-id", f"ranks{time.monotonic_ns()}", "--cache-bytes", str(16 << 20), "--run-dir", str(tmp_path),
        "--registry", str(tmp_path / "fleet"), "--block-size", "16", "--chunk-tokens", "64", "--drain-timeout-s", "5",
    ]  # fmt: skip
    (tmp_path / "fleet").mkdir()
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def ready(process: "subprocess.Popen[str]") -> list[str]:
    """The names of both nodes, once their engines are there."""
    assert process.stdout is not None
    found: list[str] = []
    for line in process.stdout:
        if line.startswith("node ready"):
            found.append(line.split("id=")[1].split()[0])
            if len(found) == 2:
                return sorted(found)
    raise AssertionError(f"only {found}")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_two_ranks_start_are_listed_and_end_as_one(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        try:
            first, second = ready(process)
            assert first.endswith("-0")
            assert second.endswith("-1")
            assert len(list((tmp_path / "fleet").iterdir())) == 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert not list((tmp_path / "fleet").iterdir())
        finally:
            process.kill()


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        try:
            ready(process)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            victim, other = map(int, children.read_text().split())
            os.kill(victim, signal.SIGKILL)
            assert process.wait(PATIENCE_S) == 1
            wait_until(lambda: not Path(f"/proc/{other}").exists())
        finally:
            process.kill()


def test_one_rank_of_a_group_elsewhere_has_the_number_that_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        '[node]\nnode_id = "moe"\ncluster = "west"\ncluster_kind = "pd"\nrole = "decode"\nmodel = "m"\nengine = "vllm"\n'
    )
    assert main(["node", "-c", str(path), "--first-rank", "3", "--", "--data-parallel-size", "2"]) != 0
    assert "--first-rank 3 need at least 4" in capsys.readouterr().err
