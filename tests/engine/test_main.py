"""The engine as a process."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from engine.emulated import emulated_tokens
from engine.main import main
from tests.engine.running import PATIENCE_S

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
        body = {"model": "emulated-kimi_linear", "prompt": [5, 6, 7], "max_tokens": 50}
        running = asyncio.create_task(asyncio.to_thread(post, url, **body))
        await until_true(lambda: "prfaas_engine_num_requests_running 1.0" in get(url, "/metrics"))
        process.send_signal(signal.SIGTERM)
        await until_true(lambda: "draining" in get(url, "/health"))
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(post, url, **body)
        with caught.value as refused:
            assert (refused.code, json.load(refused)["error"]["code"]) == (503, "draining")
        assert json.loads(await running)["choices"][0]["token_ids"] == emulated_tokens([5, 6, 7], 50)

    try:
        asyncio.run(scenario())
    finally:
        code, errors = finish(process, told=True)
    assert code == 0, errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "has no tokenizer.json"),
        ([], "--model DIR is needed"),
        (["--emulate", "kimi_linear", "--max-model-len", "0"], "max-model-len"),
        (["--emulate", "gpt5"], "invalid choice"),
        (["--port", "99999999", "--emulate", "llama"], "port"),
    ],
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(arguments))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_agent_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.main.AGENT_WAIT_S", 0.2)
    assert main(["--emulate", "llama", "--port", "0", "--agent-socket", str(tmp_path / "none.sock")]) == 3
    assert f"no agent answers at {tmp_path / 'none.sock'}" in capsys.readouterr().err


def test_help_is_quick():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "engine", "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 5.0  # importing torch takes longer, on any machine


def test_port_in_use_is_said(capsys):
    process, url = start("--emulate", "llama")
    try:
        assert main(["--emulate", "llama", "--port", url.rsplit(":", 1)[1]]) == 2
        assert "in use" in capsys.readouterr().err
    finally:
        assert finish(process)[0] == 0
