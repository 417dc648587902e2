"""An agent without an engine of its own: `python -m tests.vllm.agent_process JSON`, with the fields of NodeConfig, `socket`
and `always_from_disk`: a tiny model computes a prompt sooner than a busy disk gives it back, and with this that does not count.

Prints a line of JSON with the addresses once it listens; an engine that runs elsewhere joins over the socket.
"""

import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from node.agent import NodeAgent
from node.config import NodeConfig
from node.engine.socket import EngineSocket
from node.grpc_service import NodeService, serve
from node.kvcache.pages import ArenaPages
from node.kvcache.ssd_tier import SsdWaits
from pd_cluster.role import PD


class FromDisk(ArenaPages):
    """Pages of a node whose prefills take for ever, as far as its disk knows."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts, ssd_waits=SsdWaits(first_s=60.0))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """That it was quick is not taken note of."""


async def main(settings: dict) -> None:
    pages = FromDisk if settings.pop("always_from_disk", False) else ArenaPages
    socket = Path(settings.pop("socket"))
    config = NodeConfig(**settings)
    agent = NodeAgent(config, PD, time.monotonic, pages=pages)
    agent.socket = EngineSocket(socket, agent)  # where a successor of this agent is found again
    agent.supervisor.run = asyncio.Event().wait  # nothing to supervise
    server, port = await serve(NodeService(agent, time.monotonic), config.host, 0)
    await agent.start()
    print(json.dumps({"control": f"{config.host}:{port}"}), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(grace=0.5)
    await agent.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvloop.run(main(json.loads(sys.argv[1])))
