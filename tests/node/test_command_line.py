import argparse
from pathlib import Path

import pytest

from node.command_line import add_node_arguments, config_from, split_engine_args
from node.config import NodeConfig
from node.engine.supervisor import engine_command
from node.errors import NodeConfigError

FILE = """[node]
node_id = "n0"
cluster = "c"
cluster_kind = "prfaas"
role = "prefill"
model = "tiny"
engine_args = ["--a"]
"""


def parse(*argv: str) -> NodeConfig:
    parser = argparse.ArgumentParser()
    add_node_arguments(parser)
    own, engine_args = split_engine_args(argv)
    return config_from(parser.parse_args(own), engine_args)


def test_a_model_is_enough() -> None:
    config = parse("--engine", "vllm", "--model", "models/llama")
    assert (config.node_id, config.cluster_kind, config.role, config.model) == (
        "local-decode",
        "pd",
        "decode",
        "models/llama",
    )


def test_a_node_of_a_prfaas_cluster_prefills() -> None:
    config = parse("--cluster-kind", "prfaas", "--model", "m")
    assert (config.node_id, config.role) == ("local-prefill", "prefill")


def test_flags_win_over_the_file_and_engine_arguments_are_added(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(FILE)
    config = parse("-c", str(tmp_path / "node.toml"), "--chunk-tokens", "64", "--hugepages", "--", "--b", "--", "1")
    assert (config.node_id, config.chunk_tokens, config.hugepages) == ("n0", 64, True)
    assert config.engine_args == ("--a", "--b", "--", "1")


def test_types_are_those_of_the_file() -> None:
    config = parse("--model", "m", "--lease-s", "3", "--connections", "8")
    assert (config.lease_s, config.connections) == (3.0, 8)
    assert parse("--model", "m", "--connections", "auto").connections == "auto"


def test_bad_values_are_named_as_in_a_file() -> None:
    with pytest.raises(NodeConfigError, match="chunk_tokens = 0: must be 1 to"):
        parse("--model", "m", "--chunk-tokens", "0")
    with pytest.raises(NodeConfigError, match="give a file with -c, or at least --model"):
        parse()


def test_switching_the_engine_changes_one_word() -> None:
    embedded, vllm = (
        engine_command(
            parse("--engine", engine, "--model", "m", "--chunk-tokens", "512", "--", "--x", "1"),
            Path("/run/a/engine.sock"),
        )
        for engine in ("embedded", "vllm")
    )
    assert embedded[1:4] == ["-P", "-m", "engine"]
    assert vllm[1:4] == ["-P", "-m", "engine.vllm.launch"]
    assert vllm[4:] == [*embedded[4:-2], "--", "--allowed-media-domains", "none.invalid", "--x", "1"]


def test_a_chunk_that_nobody_asks_for_is_vllms_choice() -> None:
    """512 tokens are a CPU's; where vLLM runs on a GPU, it takes many times as many."""
    chosen = {
        engine: engine_command(parse("--engine", engine, "--model", "m"), Path("/run/a/engine.sock"))
        for engine in ("embedded", "vllm", "sglang")
    }
    assert [engine for engine, command in chosen.items() if "--chunk-tokens" in command] == ["embedded", "sglang"]
    assert chosen["embedded"][chosen["embedded"].index("--chunk-tokens") + 1] == "512"


def test_an_sglang_server_is_told_its_role() -> None:
    command = engine_command(
        parse("--engine", "sglang", "--model", "m", "--role", "prefill", "--bootstrap-port", "8998", "--", "--x"),
        Path("/run/a/engine.sock"),
    )
    assert command[1:4] == ["-P", "-m", "engine.sglang.launch"]
    assert command[-6:] == ["--role", "prefill", "--bootstrap-port", "8998", "--", "--x"]


def test_what_an_sglang_node_cannot_do_is_said_at_once() -> None:
    with pytest.raises(NodeConfigError, match="stages = 2"):
        parse("--engine", "sglang", "--model", "m", "--stages", "2")
    with pytest.raises(NodeConfigError, match="certificate: engine 'sglang'"):
        parse("--engine", "sglang", "--model", "m", "--certificate", "c", "--key", "k", "--authority", "a")
    with pytest.raises(NodeConfigError, match="bootstrap_port = 1: only engine 'sglang'"):
        parse("--model", "m", "--bootstrap-port", "1")


def test_stages_are_said_in_the_words_of_each_engine() -> None:
    socket = Path("/run/a/engine.sock")
    vllm = engine_command(parse("--engine", "vllm", "--model", "m", "--stages", "2", "--", "--x"), socket)
    assert vllm[-6:-3] == ["--", "--pipeline-parallel-size", "2"]
    assert vllm[-3:] == ["--allowed-media-domains", "none.invalid", "--x"]
    emulated = engine_command(parse("--engine", "emulated", "--model", "m.json", "--stages", "4"), socket)
    assert emulated[-2:] == ["--stages", "4"]
    assert engine_command(parse("--model", "m", "--stages", "3"), socket)[-2:] == ["--stages", "3"]
    assert "--stages" not in engine_command(parse("--engine", "emulated", "--model", "m.json"), socket)


def test_a_vllm_server_may_take_longer_to_start() -> None:
    assert parse("--engine", "vllm", "--model", "m").start_timeout_s > parse("--model", "m").start_timeout_s
    assert parse("--engine", "vllm", "--model", "m", "--engine-start-timeout-s", "5").start_timeout_s == 5.0


def test_with_certificates_the_engine_listens_on_loopback_and_the_agent_faces_the_network() -> None:
    given = ["--model", "m", "--host", "10.0.0.7", "--engine-port", "7201"]
    certified = parse(*given, "--certificate", "c", "--key", "k", "--authority", "a")
    assert _listening(engine_command(parse(*given, "--plain"), Path("/run/a/engine.sock"))) == ("10.0.0.7", "7201")
    assert _listening(engine_command(certified, Path("/run/a/engine.sock"))) == ("127.0.0.1", "0")
    assert certified.port("engine").number == 7201


def _listening(command: list[str]) -> tuple[str, str]:
    return command[command.index("--host") + 1], command[command.index("--port") + 1]
