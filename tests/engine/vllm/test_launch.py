import json
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.vllm.launch import VllmOptions, complaint_about, complaint_about_chunks, environment, main, server_command
from engine.vllm.server.seats import RankAtServer
from engine.vllm.version import is_tested, release


def options(**changes: Any) -> VllmOptions:
    values: dict[str, Any] = {
        "model": "models/tiny",
        "served_name": "tiny",
        "host": "127.0.0.1",
        "port": 8100,
        "agent_socket": Path("/run/x/engine.sock"),
        "chunk_tokens": 512,
        "threads": 2,
        "drain_timeout_s": 60.0,
    }
    return VllmOptions(**(values | changes))


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_connector_knows_its_agent_and_where_it_serves() -> None:
    command = server_command(options(model_revision="r7"), is_cpu=False)
    transfer = json.loads(value_of(command, "--kv-transfer-config"))
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    assert transfer["kv_connector_extra_config"] == {
        "agent_socket": "/run/x/engine.sock",
        "http_url": "http://127.0.0.1:8100",
        "model_revision": "r7",
    }


def test_a_server_of_several_nodes_knows_their_agents_and_takes_their_requests() -> None:
    near, far = socket.socketpair()
    with near, far, socket.create_server(("127.0.0.1", 0)) as listener:
        other = RankAtServer("/run/y/engine.sock", "127.0.0.1", listener, near)
        command = server_command(options(other_ranks=(other,)), is_cpu=False)
        port = listener.getsockname()[1]
    settings = json.loads(value_of(command, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert settings["agent_socket"] == "/run/x/engine.sock"
    assert settings["other_ranks"] == [{"agent_socket": "/run/y/engine.sock", "http_url": f"http://127.0.0.1:{port}"}]
    assert command.count("--middleware") == 1, "vLLM warns of two"
    assert value_of(command, "--middleware") == "engine.vllm.server.rank_ports.RankPorts"


def test_a_prefill_step_is_a_chunk() -> None:
    command = server_command(options(chunk_tokens=128), is_cpu=True)
    assert (value_of(command, "--max-num-batched-tokens"), value_of(command, "--max-num-seqs")) == ("128", "128")
    command = server_command(options(chunk_tokens=128), is_cpu=False)
    assert value_of(command, "--max-num-batched-tokens") == "128"
    assert "--max-num-seqs" not in command, "vLLM has no more than a chunk has room for"


def test_an_accelerators_steps_are_as_large_as_vllm_makes_them() -> None:
    """512 tokens where it would take 8,192 are 111 steps instead of 5 for 30,000 tokens of a hybrid."""
    untold = options(chunk_tokens=None)
    assert not {"--max-num-batched-tokens", "--max-num-seqs"} & set(server_command(untold, is_cpu=False))
    on_cpu = server_command(untold, is_cpu=True)
    assert (value_of(on_cpu, "--max-num-batched-tokens"), value_of(on_cpu, "--max-num-seqs")) == ("512", "256")
    with_blocks = server_command(options(chunk_tokens=None, block_size=1024), is_cpu=True)
    assert value_of(with_blocks, "--max-num-batched-tokens") == "1024"


def test_events_are_published_beside_the_agents_socket() -> None:
    events = json.loads(value_of(server_command(options(), is_cpu=False), "--kv-events-config"))
    assert events["endpoint"] == "ipc:///run/x/kv-events"


def test_what_is_left_to_vllm_is_not_said() -> None:
    command = server_command(options(), is_cpu=False)
    assert not {"--block-size", "--max-model-len", "--enforce-eager"} & set(command)
    command = server_command(options(block_size=128, max_model_len=4096), is_cpu=True)
    assert (value_of(command, "--block-size"), value_of(command, "--max-model-len")) == ("128", "4096")
    assert "--enforce-eager" in command


def test_a_server_says_which_tokens_it_reads_where_it_can() -> None:
    assert "--enable-scale-out" in server_command(options(), is_cpu=False)
    assert "--enable-scale-out" not in server_command(options(), is_cpu=False, renders=False)


def test_flags_of_the_operator_come_last_and_so_win() -> None:
    flags = ("--max-num-batched-tokens", "8192", "--tensor-parallel-size", "2")
    assert server_command(options(vllm_flags=flags), is_cpu=True)[-4:] == list(flags)


@pytest.mark.parametrize("flag", ["--port", "--port=1", "--kv-transfer-config", "--kv_transfer_config={}", "--model"])
def test_flags_that_the_node_speaks_for_are_refused(flag: str) -> None:
    complaint = complaint_about((flag,))
    assert complaint is not None
    assert "is set by the node: use its " in complaint


def test_the_operators_environment_wins() -> None:
    chosen = environment(options(), {"VLLM_CPU_KVCACHE_SPACE": "8", "HOME": "/h"}, is_cpu=True)
    assert (chosen["VLLM_CPU_KVCACHE_SPACE"], chosen["OMP_NUM_THREADS"], chosen["HOME"]) == ("8", "2", "/h")
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(options(), {}, is_cpu=False)


def test_sockets_of_vllms_own_go_with_the_agents_directory() -> None:
    assert environment(options(), {}, is_cpu=True)["VLLM_RPC_BASE_PATH"] == "/run/x"
    too_long = options(agent_socket=Path(f"/run/{'x' * 80}/engine.sock"))
    assert "VLLM_RPC_BASE_PATH" not in environment(too_long, {}, is_cpu=True)


@pytest.mark.parametrize(
    ("version", "tested"),
    [("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", True), ("0.34.0", False), ("0.3.2", False)],
)
def test_versions(version: str, tested: bool) -> None:
    assert is_tested(version) is tested


@pytest.mark.parametrize(
    ("version", "named"), [("0.32.0", "0.32"), ("0.32.1+cpu", "0.32"), ("0.33.0rc1", "0.33"), ("1.0", "1.0")]
)
def test_patches_of_a_release_keep_kvcache_as_it_is(version: str, named: str) -> None:
    assert release(version) == named


ARGUMENTS = ["--model", "m", "--agent-socket", "/run/x/engine.sock"]


def test_without_vllm_it_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS, version_of=lambda: None) == 2
    assert "pip install 'prfaas[vllm]'" in capsys.readouterr().err


def test_it_becomes_the_server_and_warns_of_a_version_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    started: list[list[str]] = []
    main(
        [*ARGUMENTS, "--", "--seed", "3"],
        version_of=lambda: "0.40.0+cpu",
        become=lambda path, argv, env: started.append(argv),
    )
    assert started[0][1:4] == ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert started[0][-3:] == ["--enforce-eager", "--seed", "3"]
    assert int(value_of(started[0], "--port")) > 0
    assert "vLLM 0.40.0+cpu has not been tested" in capsys.readouterr().err


def test_chunks_below_a_block_are_refused() -> None:
    assert complaint_about_chunks(options(chunk_tokens=128, block_size=None)) is None
    assert complaint_about_chunks(options(chunk_tokens=None, block_size=128)) is None
    assert complaint_about_chunks(options(chunk_tokens=128, block_size=128)) is None
    refused = complaint_about_chunks(options(chunk_tokens=127, block_size=128))
    assert refused == "chunk_tokens = 127: less than a block, block_size = 128"
