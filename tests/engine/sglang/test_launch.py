import json
from pathlib import Path
from typing import Any

import pytest

from engine.sglang.launch import SglangOptions, environment, main, server_command
from transport.control.last_words import CANNOT_SERVE


def options(**changes: Any) -> SglangOptions:
    values: dict[str, Any] = {
        "model": "models/tiny",
        "served_name": "tiny",
        "role": "prefill",
        "host": "127.0.0.1",
        "port": 8100,
        "bootstrap_port": 8998,
        "agent_socket": Path("/run/x/engine.sock"),
        "chunk_tokens": 512,
        "block_size": 64,
        "max_model_len": 4096,
    }
    return SglangOptions(**(values | changes))


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_server_has_the_nodes_role_and_our_backend() -> None:
    command = server_command(options())
    assert command[:3] == ["-P", "-m", "sglang.launch_server"]
    assert value_of(command, "--disaggregation-mode") == "prefill"
    assert value_of(command, "--disaggregation-transfer-backend") == "prfaas"
    assert value_of(command, "--disaggregation-bootstrap-port") == "8998"
    assert (value_of(command, "--page-size"), value_of(command, "--context-length")) == ("64", "4096")
    assert value_of(command, "--chunked-prefill-size") == "512"


def test_one_that_decodes_opens_no_rooms_and_keeps_no_prefixes() -> None:
    command = server_command(options(role="decode"))
    assert not {"--disaggregation-bootstrap-port", "--kv-events-config"} & set(command)


def test_events_are_published_beside_the_agents_socket_and_tell_salts_apart() -> None:
    events = json.loads(value_of(server_command(options()), "--kv-events-config"))
    assert (events["endpoint"], events["format"]) == ("ipc:///run/x/kv-events", "dynamo")


def test_flags_of_the_operator_come_last_and_so_win() -> None:
    flags = ("--chunked-prefill-size", "8192")
    assert server_command(options(sglang_flags=flags))[-2:] == list(flags)


def test_the_agent_is_named_whatever_is_set() -> None:
    chosen = environment(options(model_revision="r7"), {"PRFAAS_AGENT_SOCKET": "/other", "SGLANG_HOST_IP": "10.0.0.1"})
    assert (chosen["PRFAAS_AGENT_SOCKET"], chosen["PRFAAS_MODEL_REVISION"]) == ("/run/x/engine.sock", "r7")
    assert (chosen["SGLANG_HOST_IP"], environment(options(), {})["SGLANG_HOST_IP"]) == ("10.0.0.1", "127.0.0.1")


def test_health_asks_for_no_token() -> None:
    assert environment(options(), {})["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"


def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return str(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    own = ["--role", "prefill", "--agent-socket", "/run/x/engine.sock"]
    assert main([*own, *arguments], version_of=lambda: None) == 2
    told = capsys.readouterr().err
    assert told.startswith(CANNOT_SERVE)
    return told


def test_what_cannot_be_served_is_said_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = model(tmp_path)
    assert "is not a directory" in said(capsys, "--model", "org/name", "--max-model-len", "64")
    assert "max_model_len is missing" in said(capsys, "--model", found)
    assert "one agent serves one rank" in said(capsys, "--model", found, "--max-model-len", "64", "--", "--tp", "2")
    assert "less than a page" in said(capsys, "--model", found, "--max-model-len", "64", "--chunk-tokens", "10")
    assert "an adapter's name" in said(capsys, "--model", found, "--max-model-len", "64", "--model-name", "a:b")
    assert "SGLang is not installed" in said(capsys, "--model", found, "--max-model-len", "64")


def test_the_process_becomes_the_server(tmp_path: Path) -> None:
    became: list[Any] = []
    node = [
        "--model",
        model(tmp_path),
        "--role",
        "decode",
        "--agent-socket",
        "/run/x/engine.sock",
        "--max-model-len",
        "64",
    ]
    main(
        [*node, "--", "--device", "cpu"],
        version_of=lambda: "0.5.23",
        become=lambda *arguments: became.extend(arguments),
    )
    path, command, _ = became
    assert (command[0], command[-2:]) == (path, ["--device", "cpu"])
    assert int(value_of(command, "--port")) > 0
