"""Several engines from one node's file."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from engine.vllm.server.seats import Seat
from node.config import NodeConfig
from prfaas.cli import main
from prfaas.errors import StartRefused
from prfaas.system.ranks import DEVICES, RankPlan, plans_of, rank_plans, run_ranks
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

PATIENCE_S = 120.0
LONG_ANSWER = {"model": "kimi_linear", "prompt": [1, 2, 3], "max_tokens": 30_000, "stream": True, "ignore_eos": True}
ENDS_WITHIN_S = 10.0  # an emulated engine that has nothing to do takes a second to end


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
        "203.0.113.7:7102",
    )  # fmt: skip
    assert found[1].command(["node", "-c", "f.toml", "--ranks", "2"], ["--dtype", "auto"])[-3:] == [
        "--",
        "--dtype",
        "auto",
    ]


def test_a_rank_is_not_told_of_ranks() -> None:
    """It would start ranks of its own, and each of these, too."""
    own = ["node", "-c", "f.toml", "--ranks=2", "--first-rank", "8", "--role", "decode", "--first=9"]
    command = plans(first=8)[0].command(own, [])
    assert command[command.index("node") :] == [
        "node", "-c", "f.toml", "--role", "decode", "--node-id", "big-8", "--",
    ]  # fmt: skip


def test_ranks_of_experts_are_one_group() -> None:
    first, second = plans(engine_args=("--data_parallel_size=2",))
    group = ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "4711", "--data-parallel-rank")
    assert first.engine_flags == (*group, "0")
    assert second.engine_flags == (*group, "1")
    elsewhere = ("-dp", "16", "-dpa", "10.0.0.1", "-dpp", "5000")
    third, _ = plans(first=8, engine_args=elsewhere)
    assert third.flags[-2:] == ("--engine-max-restarts", "0"), "it could not join those of other machines again"
    assert "--engine-max-restarts" not in first.flags
    assert first.is_of_group
    assert third.is_of_group
    assert third.node_id == "big-8"
    assert third.engine_flags == ("--data-parallel-rank", "8")


def test_engines_without_a_group_get_no_flags_and_equal_parts_of_the_devices() -> None:
    found = plans(environment={DEVICES: "0,1,2,3"})
    assert [each.engine_flags for each in found] == [(), ()]
    assert [each.environment for each in found] == [{DEVICES: "0,1"}, {DEVICES: "2,3"}]
    assert plans()[0].environment == {}


def test_each_rank_has_a_certificate_of_its_own() -> None:
    files: dict[str, Any] = {"certificate": "c-{rank}.pem", "key": "k-{rank}.pem", "authority": "a.pem"}
    assert "c-1.pem" in plans(**files)[1].flags
    assert "k-1.pem" in plans(**files)[1].flags
    with pytest.raises(StartRefused, match=r"certificate = 'c.pem'.*\{rank\}"):
        plans(**{**files, "certificate": "c.pem"})


def test_a_server_sees_the_devices_of_its_rank_alone() -> None:
    """vLLM's ranks of the external kind each take the first devices that they see."""
    found = plans(engine="vllm", engine_args=("-tp", "2", "--pipeline-parallel-size", "2"))
    assert [each.environment for each in found] == [{DEVICES: "0,1,2,3"}, {DEVICES: "4,5,6,7"}]
    assert [each.environment for each in plans(engine="vllm")] == [{DEVICES: "0"}, {DEVICES: "1"}]
    assert [each.environment for each in plans(engine="vllm", environment={DEVICES: ""})] == [{}, {}]
    assert [each.environment[DEVICES] for each in plans(engine="sglang", engine_args=("--tp", "2"))] == ["0,1", "2,3"]
    with pytest.raises(StartRefused, match="1 for each of 2 ranks, whose engine needs 2"):
        plans(engine="vllm", engine_args=("-tp=2",), environment={DEVICES: "0,1"})


def test_devices_are_dealt_out_by_the_variable_that_names_them() -> None:
    """vLLM on ROCm does not start where both name devices that differ."""
    hip = {"HIP_VISIBLE_DEVICES": "4,5,6,7"}
    assert plans(engine="vllm", environment=hip)[1].environment == {"HIP_VISIBLE_DEVICES": "6,7"}
    both = plans(engine="vllm", environment={**hip, DEVICES: "4,5,6,7"})[1].environment
    assert both == {"HIP_VISIBLE_DEVICES": "6,7", DEVICES: "6,7"}
    named = "GPU-8932f937,MIG-GPU-8932f937/1/0"
    assert plans(environment={DEVICES: named})[1].environment == {DEVICES: "MIG-GPU-8932f937/1/0"}
    assert plans(environment={DEVICES: "-1"})[0].environment == {}, "none is seen"


def test_an_empty_value_is_no_flag() -> None:
    assert plans(engine_args=("--chat-template", ""))[0].engine_flags == ()


@pytest.mark.parametrize(
    ("engine_args", "environment", "said"),
    [
        (("-dp", "2", "-dpl", "2"), {}, "--data-parallel-size-local: leave it out with --ranks"),
        (("-dp", "2", "--data_parallel_hybrid_lb"), {}, "--data-parallel-hybrid-lb: leave it out"),
        (("-dp", "2", "-dpm"), {}, "--data-parallel-multi-port-external-lb: leave it out"),
        (("--device-ids", "0,1"), {}, "set CUDA_VISIBLE_DEVICES"),
        (("--data-parallel-size", "1"), {}, "need at least 2"),
        (("-dp", "4"), {}, "2 of 4 ranks run elsewhere: --data-parallel-address HOST, where rank 0 runs"),
        (("-dp", "4", "-dpa", "10.0.0.1"), {}, "--data-parallel-rpc-port PORT, the same for all"),
        (("-dp", "2", "--data-parallel-rank", "0"), {}, "--data-parallel-rank"),
        ((), {DEVICES: "0,1,2"}, "3 devices"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    engine_args: tuple[str, ...], environment: Mapping[str, str], said: str
) -> None:
    with pytest.raises(StartRefused, match=said):
        plans(environment=environment, engine_args=engine_args)


def one_server(environment: Mapping[str, str] | None = None, **changes: Any) -> list[RankPlan]:
    return plans_of(config(**{"engine": "vllm", **changes}), None, None, environment or {}, lambda: 4711)


def test_vllms_own_flag_has_all_engines_in_one_server() -> None:
    """As `vllm serve` reads it."""
    found = one_server(engine_args=("--data_parallel_size", "2"), engine_port=7201, environment={DEVICES: "0,1"})
    assert [each.node_id for each in found] == ["big-0", "big-1"]
    assert found[1].flags == ("--node-id", "big-1", "--engine-port", "7202")
    assert [(each.engine_flags, each.environment) for each in found] == [((), {})] * 2, "vLLM shares out the devices"
    assert all(each.is_of_group and each.shares_server for each in found)


def test_a_node_of_one_engine_is_no_group() -> None:
    assert one_server() == []
    assert one_server(engine_args=("-dp", "1")) == []
    assert one_server(engine_args=("-dp", "2", "-dpn", "1")) == [], "the rank of a server of its own"
    assert one_server(engine_args=("-dp", "2", "--data-parallel-external-lb")) == []
    assert one_server(engine_args=("-dp", "2"), engine="sglang") == []
    seat = Seat(Path("/tmp/x"), 1, 2).environment()
    assert one_server(seat, engine_args=("-dp", "2")) == [], "it would start ranks of its own, and each of these, too"


def test_one_rank_of_a_machine_is_none_of_one_server() -> None:
    """What a refusal of `--data-parallel-size-local 1` tells to write."""
    group = ("-dp", "2", "--data-parallel-address", "10.0.1.5", "--data-parallel-rpc-port", "29550")
    (only,) = plans_of(config(engine="vllm", engine_args=group), 1, None, {}, lambda: 4711)
    assert (only.node_id, only.shares_server, only.engine_flags) == ("big-0", False, ("--data-parallel-rank", "0"))
    with pytest.raises(StartRefused, match="--data-parallel-address: needed, as 1 of 2 ranks run elsewhere"):
        plans_of(config(engine="vllm", engine_args=("-dp", "2")), 1, None, {}, lambda: 4711)
    assert plans_of(config(engine="vllm"), 1, None, {}, lambda: 4711) == [], "a node as any other"


def test_with_ranks_each_has_a_server() -> None:
    found = plans_of(config(engine="vllm", engine_args=("-dp", "2")), 2, None, {}, lambda: 4711)
    assert [each.shares_server for each in found] == [False, False]
    assert "--data-parallel-rank" in found[0].engine_flags


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-dpl", "1"), "--ranks 1 .* --data-parallel-size 2 --data-parallel-address HOST"),
        (("--api-server-count", "2"), "--api-server-count: .* one process takes the requests of all ranks"),
        (("-dph",), "--data-parallel-hybrid-lb: .* gateways balance the ranks"),
        (("-dpm",), "--data-parallel-multi-port-external-lb: .* a server for each rank"),
        (("--data-parallel-start-rank", "2"), "see --ranks and --first-rank"),
        (("-dpb", "ray"), "--data-parallel-backend ray: .* processes here"),
        (("--enable-elastic-ep",), "--enable-elastic-ep"),
        (("--headless",), "--headless"),
        (("--nnodes", "2"), "--nnodes"),
    ],
)
def test_what_one_server_cannot_have_is_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(StartRefused, match=said):
        one_server(engine_args=("--data-parallel-size", "2", *flags))


def test_one_server_needs_what_any_ranks_need() -> None:
    group = ("--data-parallel-size", "2")
    assert len(one_server(engine_args=(*group, "-dpl", "2", "-dpb", "mp"))) == 2
    with pytest.raises(StartRefused, match=r"certificate = 'c.pem'.*\{rank\}"):
        one_server(engine_args=group, certificate="c.pem", key="k-{rank}.pem", authority="a.pem")
    with pytest.raises(StartRefused, match=r"control_port = 65535"):
        one_server(engine_args=group, control_port=65535)
    with pytest.raises(StartRefused, match="65: a machine has 64 ranks at most"):
        one_server(engine_args=("--data-parallel-size", "65"))


SAYS_ITS_SEAT = """
import os, sys
from pathlib import Path
from engine.vllm.server.seats import Seat
seat = Seat.of(os.environ)
assert seat.meeting_place.parent.is_dir()
Path(sys.argv[1], str(seat.rank)).write_text(f"{seat.meeting_place}:{seat.count}")
"""


def test_ranks_of_one_server_have_a_place_to_meet_which_goes_with_them(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", SAYS_ITS_SEAT, str(tmp_path)]] * 2
    both = one_server(engine_args=("--data-parallel-size", "2"))
    asyncio.run(run_ranks(both, commands, 0.0, print))
    told = {path.read_text() for path in tmp_path.iterdir()}
    assert len(told) == 1
    place, _, count = told.pop().rpartition(":")
    assert count == "2"
    assert not Path(place).parent.exists()


def test_ports_that_two_ranks_would_share_are_named() -> None:
    with pytest.raises(StartRefused, match=r"transfer_port = 7002 .*control_port = 7001"):
        plans(control_port=7001, transfer_port=7002)
    with pytest.raises(StartRefused, match=r"control_port = 65535"):
        plans(control_port=65535)
    assert len(plans(3, control_port=7001, transfer_port=7004)) == 3
    with pytest.raises(StartRefused, match=r"engine_port = 8999 .*bootstrap_port = 8998"):
        plans(engine="sglang", bootstrap_port=8998, engine_port=8999)
    with pytest.raises(StartRefused, match=r"metrics_port = 7101 .*control_port = 7100"):
        plans(plain=True, host="0.0.0.0", control_port=7100, metrics_port=7101)


def test_each_rank_takes_picked_requests_at_a_port_of_its_own() -> None:
    assert [each.flags[-2:] for each in plans(picked_port=7400)] == [
        ("--picked-port", "7400"),
        ("--picked-port", "7401"),
    ]
    with pytest.raises(StartRefused, match=r"picked_port = 7401 .*engine_port = 7400"):
        plans(engine_port=7400, picked_port=7401)


def test_ranks_that_are_told_to_end_before_they_listen_to_it_have_not_failed() -> None:
    """What stops a service while it starts would call it failed."""

    async def scenario() -> int:
        async with asyncio.timeout(PATIENCE_S):
            running = asyncio.create_task(run_ranks(plans(), [["sleep", "600"]] * 2, 0.0, print))
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            return await running

    assert asyncio.run(scenario()) == 0


def group_commands(tmp_path: Path, drain_timeout_s: str = "30", *engine_args: str) -> list[list[str]]:
    """Two emulated nodes, started as a group."""
    (tmp_path / "fleet").mkdir()
    return [
        [
            sys.executable, "-m", "prfaas", "node", "--engine", "emulated", "--model", "kimi_linear", "--ranks", "1",
            "--node-id", f"group{time.monotonic_ns()}-{rank}", "--cache-bytes", str(16 << 20), "--run-dir",
            str(tmp_path), "--registry", str(tmp_path / "fleet"), "--block-size", "16", "--chunk-tokens", "64",
            "--drain-timeout-s", drain_timeout_s, *engine_args,
        ]
        for rank in range(2)
    ]  # fmt: skip


def group_plans() -> list[RankPlan]:
    return plans(engine_args=("--data-parallel-size", "2"))


def agents(tmp_path: Path) -> list[str]:
    """Where the agents of both are asked, in the order of the ranks."""
    files = sorted((tmp_path / "fleet").glob("*.json"), key=lambda path: path.stem.rpartition("-")[2])
    return [json.loads(path.read_text())["agent"] for path in files]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def described(address: str) -> pb.NodeDescription:
    async with grpc.aio.insecure_channel(address) as channel:
        description: pb.NodeDescription = await rpc.NodeAgentStub(channel).Describe(pb.DescribeRequest(), timeout=30.0)  # type: ignore[no-untyped-call]
        return description


async def serving(tmp_path: Path) -> list[pb.NodeDescription]:
    """Both nodes, once both have engines that serve."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            found = [await described(address) for address in agents(tmp_path)]
            if len(found) == 2 and all(each.state == pb.NODE_STATE_READY for each in found):
                return found
        await asyncio.sleep(0.1)


@pytest.mark.timeout(300)
def test_engines_of_a_group_start_anew_together_and_their_nodes_go_on(tmp_path: Path) -> None:
    """One alone could not join the others again."""

    async def scenario() -> int:
        async with asyncio.timeout(PATIENCE_S):
            running = asyncio.create_task(run_ranks(group_plans(), group_commands(tmp_path), 30.0, print))
            before = await serving(tmp_path)
            os.kill(before[1].engine_pid, signal.SIGKILL)
            pids = {each.engine_pid for each in before}
            after = await serving(tmp_path)
            while pids & {each.engine_pid for each in after}:
                await asyncio.sleep(0.1)
                after = await serving(tmp_path)
            assert [each.boot_id for each in after] == [each.boot_id for each in before], "their caches are there still"
            os.kill(os.getpid(), signal.SIGTERM)
            return await running

    assert asyncio.run(scenario()) == 0


@pytest.mark.timeout(300)
def test_no_engine_of_a_group_ends_while_another_rank_still_answers(tmp_path: Path) -> None:
    """The answer needs them all."""

    async def scenario() -> int:
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            commands = group_commands(tmp_path, "30", "--", "--decode-step-s", "0.002")  # its answer takes a minute
            running = asyncio.create_task(run_ranks(group_plans(), commands, 30.0, print))
            idle, busy = await serving(tmp_path)
            async with session.post(f"{busy.engine_url}/v1/completions", json=LONG_ANSWER) as answer:
                assert await anext(aiter(answer.content))
                os.kill(os.getpid(), signal.SIGTERM)
                told_at = time.monotonic()
                async for _ in answer.content:
                    if time.monotonic() > told_at + ENDS_WITHIN_S:
                        break
                else:
                    raise AssertionError("the answer was too short")
                assert is_running(idle.engine_pid), "it had nothing to do, and stayed"
            return await running

    assert asyncio.run(scenario()) == 0


@pytest.mark.timeout(300)
def test_a_rank_that_hangs_keeps_no_other_one_longer_than_its_own_drain(tmp_path: Path) -> None:
    """What stops a service kills it after that time."""
    drain_s = 12.0

    async def scenario() -> float:
        async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
            commands = group_commands(tmp_path, str(drain_s))
            running = asyncio.create_task(run_ranks(group_plans(), commands, drain_s, print))
            busy, hanging = await serving(tmp_path)
            agent = parent_of(hanging.engine_pid)
            os.kill(agent, signal.SIGSTOP)
            async with session.post(f"{busy.engine_url}/v1/completions", json=LONG_ANSWER) as answer:
                assert await anext(aiter(answer.content))
                os.kill(os.getpid(), signal.SIGTERM)
                told_at = time.monotonic()
                async for _ in answer.content:
                    if time.monotonic() > told_at + drain_s:
                        break
            while len(list((tmp_path / "fleet").iterdir())) == 2:  # noqa: ASYNC110 of another process
                await asyncio.sleep(0.05)
            ended_after_s = time.monotonic() - told_at
            os.kill(agent, signal.SIGKILL)
            await running
            return ended_after_s

    assert asyncio.run(scenario()) < drain_s + 20.0  # what started both ends them more than half a minute after that


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start(tmp_path: Path, *more: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable, "-m", "prfaas", "node", "--engine", "emulated", "--model", "kimi_linear", "--ranks", "2",
        "--node-id", f"ranks{time.monotonic_ns()}", "--cache-bytes", str(16 << 20), "--run-dir", str(tmp_path),
        "--registry", str(tmp_path / "fleet"), "--block-size", "16", "--chunk-tokens", "64", "--drain-timeout-s", "5",
        *more,
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
def test_ranks_of_a_second_machine_are_counted_on(tmp_path: Path) -> None:
    with start(tmp_path, "--first-rank", "2") as process:
        try:
            assert [name.rpartition("-")[2] for name in ready(process)] == ["2", "3"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
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
