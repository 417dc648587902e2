"""The examples run as they stand, and the notebook prints what it shows. Those of SDKs that we do not install: tests/clients."""

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.examples import notebook
from tests.gateway.worlds import on_loop, world

EXAMPLES = Path(__file__).parents[2] / "examples"
PLANNER = notebook.read(EXAMPLES / "planner.ipynb")


async def run(*command: str) -> str:
    """What a command prints against a gateway before scripted nodes. Fails if its status is not 0."""
    async with world() as w:
        for node in w.nodes.nodes:
            node.max_model_len = 1 << 17
        process = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | {"GATEWAY": w.gateway.url},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        text = (await process.communicate())[0].decode()
        assert process.returncode == 0, text
        return text


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@on_loop
async def test_curl() -> None:
    text = await run(str(EXAMPLES / "curl.sh"))
    assert "# A chat with scripted" in text
    assert "data: [DONE]" in text
    assert "x-prfaas-route: local" in text.lower()
    assert '"verdict":{"accepted":true' in text


@on_loop
async def test_openai_sdk() -> None:
    text = await run(sys.executable, str(EXAMPLES / "openai_sdk.py"))
    assert [line.split(":")[0] for line in text.splitlines()] == ["chat", "stream", "route", "usage", "usage"]
    assert "route:  local;" in text


def test_the_notebook_prints_what_it_shows() -> None:
    assert notebook.printed(PLANNER) == notebook.stored(PLANNER)


def test_the_notebook_is_a_whole_one() -> None:
    assert (PLANNER["nbformat"], PLANNER["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in PLANNER["cells"]]
    assert len(set(ids)) == len(ids)
    counts = [cell["execution_count"] for cell in notebook.code_cells(PLANNER)]
    assert counts == list(range(1, len(counts) + 1))
