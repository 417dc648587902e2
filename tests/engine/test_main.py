"""The engine as a process."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from engine.emulated.emulated import emulated_tokens
from engine.main import main
from tests.engine.running import PATIENCE_S
from tests.engine.standins import stand_in

COMMAND = [sys.executable, "-m", "engine", "--port", "0"]


def start(*arguments):
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("engine ready url=http://127.0.0.1:"), process.stderr.read()
    return process, line.strip().partition("url=")[2]


def post(url, **body):
    data = json.dumps({"temperature": 0, "ignore_eos": True, "return_token_ids": True} | body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", data), timeout=PATIENCE_S) as response:
        return response.read().decode()


def get(url, path):
    try:
        with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as response:
            return response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


async def until_true(holds):
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 it changes in another process
            await asyncio.sleep(0.01)


def finish(process, *, told=False):
    if not told:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


@pytest.mark.slow
def test_real_model_serves_and_ends_on_sigterm(model_dir):
    process, url = start("--model", str(model_dir("lfm2")))
    try:
        answer = json.loads(post(url, model="lfm2", prompt="hello", max_tokens=4))
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        code, errors = finish(process)
    assert code == 0
    assert "Traceback" not in errors


def test_running_stream_finishes_after_sigterm_and_new_ones_are_refused():
    process, url = start("--emulate", "kimi_linear", "--decode-step-s", "0.1")

    async def scenario():
        body = {"model": "emulated-kimi_linear", "prompt": [5, 6, 7], "max_tokens": 30}
        running = asyncio.create_task(asyncio.to_thread(post, url, **body))
        await until_true(lambda: "prfaas_engine_num_requests_running 1.0" in get(url, "/metrics"))
        process.send_signal(signal.SIGTERM)
        await until_true(lambda: "draining" in get(url, "/health"))
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(post, url, **body)
        with caught.value as refused:
            assert (refused.code, json.load(refused)["error"]["code"]) == (503, "draining")
        assert json.loads(await running)["choices"][0]["token_ids"] == emulated_tokens([5, 6, 7], 30)

    try:
        asyncio.run(scenario())
    finally:
        code, errors = finish(process, told=True)
    assert code == 0, errors


PARENT = """
import ctypes, signal, subprocess, sys
libc = ctypes.CDLL(None)
subprocess.run(sys.argv[1:], preexec_fn=lambda: libc.prctl(1, signal.SIGTERM))
"""


@pytest.mark.rotating
@pytest.mark.dimensions(already_draining=None)
@pytest.mark.parametrize("already_draining", [False, True])
def test_an_orphan_ends_at_once_and_frees_its_port(already_draining):
    """However much it has to do: its answer would take seven minutes, its drain may take ten."""
    engine = [*COMMAND, "--emulate", "llama", "--decode-step-s", "0.1", "--drain-timeout-s", "600"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *engine], stdout=subprocess.PIPE, text=True)
    url = parent.stdout.readline().strip().partition("url=")[2]
    port = int(url.rpartition(":")[2])
    child = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()[0])

    async def scenario():
        running = asyncio.create_task(
            asyncio.to_thread(post, url, model="emulated-llama", prompt=[5, 6, 7], max_tokens=4000)
        )
        await until_true(lambda: "prfaas_engine_num_requests_running 1.0" in get(url, "/metrics"))
        if already_draining:
            os.kill(child, signal.SIGTERM)
            await until_true(lambda: "draining" in get(url, "/health"))
        parent.kill()
        await until_true(lambda: is_free(port) and not Path(f"/proc/{child}").exists())
        with pytest.raises((urllib.error.URLError, ConnectionError, http.client.HTTPException)):
            await running

    try:
        asyncio.run(scenario())
    finally:
        parent.kill()
        parent.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_stand_in_from_a_file(tmp_path):
    path = tmp_path / "m.json"
    path.write_bytes(msgspec.json.encode(stand_in(prefill_points=((0, 0.0), (1000, 0.1)), step_s=0.001)))
    process, url = start("--emulate", str(path), "--model-name", "m")
    try:
        answer = json.loads(post(url, model="m", prompt=[5, 6, 7], max_tokens=9))
        assert answer["choices"][0]["token_ids"] == emulated_tokens([5, 6, 7], 9)
    finally:
        assert finish(process)[0] == 0


def test_an_architecture_in_stages():
    process, url = start("--emulate", "llama", "--model-name", "m", "--stages", "3", "--prefill-per-token-s", "0.001")
    try:
        answer = json.loads(post(url, model="m", prompt=[5] * 200, max_tokens=5))
        assert answer["choices"][0]["token_ids"] == emulated_tokens([5] * 200, 5)
    finally:
        assert finish(process)[0] == 0


def test_an_emulation_of_a_model_directory(model_dir):
    """As a topology names it: architecture and tokenizer are the directory's."""
    process, url = start("--emulate", str(model_dir("granite_hybrid")), "--model-name", "m")
    try:
        answer = json.loads(post(url, model="m", prompt=[5, 6, 7], max_tokens=9))
        assert answer["choices"][0]["token_ids"] == emulated_tokens([5, 6, 7], 9)
    finally:
        assert finish(process)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "has no tokenizer.json"),
        ([], "--model DIR is needed"),
        (["--emulate", "kimi_linear", "--max-model-len", "0"], "max-model-len"),
        (["--emulate", "gpt5"], "neither a directory nor one of"),
        (["--model", "/nowhere", "--stages", "2"], "has no tokenizer.json"),
        (["--emulate", "llama", "--stages", "2", "--prefill-base-s", "1"], "give --prefill-per-token-s alone"),
        (["--emulate", "llama", "--block-size", "1024"], "chunk_tokens = 512: less than a block, block_size = 1024"),
        (["--model", "/nowhere", "--chunk-tokens", "16"], "chunk_tokens = 16: less than a block, block_size = 64"),
        (["--port", "99999999", "--emulate", "llama"], "port"),
    ],
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(arguments))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_agent_is_said(tmp_path, capsys):
    arguments = ["--emulate", "llama", "--port", "0", "--agent-socket", str(tmp_path / "none.sock")]
    assert main([*arguments, "--agent-timeout-s", "0.2"]) == 3
    assert f"no agent answers at {tmp_path / 'none.sock'}" in capsys.readouterr().err


def test_help_imports_no_model_code():
    """torch and transformers take seconds to import; questions about the commands must not wait for them."""
    command = [sys.executable, "-X", "importtime", "-m", "engine", "--help"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert "engine.main" in imported
    assert not {"torch", "transformers", "vllm"} & imported


def test_port_in_use_is_said(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--emulate", "llama", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err
