"""Runs a command while gateways serve: `python -m tests.clients.behind [--demo] COMMAND …`. The status is the command's.

Where they answer is in the environment, and may stand in the command: {GATEWAY} is one before scripted nodes or, with --demo,
before both clusters of the demo and its tiny model; {TOOL_GATEWAY}'s scripted nodes call a tool, which no tiny model does.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from prfaas.system.models import ensure_model
from prfaas.system.system import System
from prfaas.system.topology import DEFAULT_FILE, load_topology
from tests.gateway.worlds import world

STATE_DIR = Path(".prfaas")
MAX_MODEL_LEN = 1 << 17
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 7}'}}
ANSWER = {"content": "Let me look.", "tool_calls": [CALL]}


@asynccontextmanager
async def scripted(*, calls: bool) -> AsyncIterator[str]:
    """The URL of a gateway before scripted nodes."""
    async with world() as w:
        for node in w.nodes.nodes:
            node.max_model_len = MAX_MODEL_LEN
            if calls:
                node.script.deltas, node.script.finish_reason = (ANSWER,), "tool_calls"
        yield w.gateway.url


@asynccontextmanager
async def demo() -> AsyncIterator[str]:
    """The URL of the demo's gateway."""
    topology = load_topology(DEFAULT_FILE, STATE_DIR).replace_gateway(port=0)
    ensure_model(topology.model, STATE_DIR, print)
    async with System(topology, STATE_DIR / "clients", print) as system:
        yield system.api_url


async def run(command: Sequence[str]) -> int:
    """The command's status."""
    is_demo = command[0] == "--demo"
    async with demo() if is_demo else scripted(calls=False) as url, scripted(calls=True) as calling:
        places = {"GATEWAY": url, "TOOL_GATEWAY": calling}
        arguments = [part.format(**places) for part in command[is_demo:]]
        process = await asyncio.create_subprocess_exec(*arguments, env=os.environ | places)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
