"""The control port and those who connect to it and say nothing."""

import asyncio
import time
from typing import cast

from node.agent import NodeAgent
from node.grpc_service import NodeService, serve
from tests.node.running import new_runner

PATIENCE_S = 60.0


def test_a_stranger_who_says_nothing_is_turned_away() -> None:
    async def scenario() -> None:
        service = NodeService(cast(NodeAgent, None), time.monotonic)  # it is never asked for anything
        server, port = await serve(service, "127.0.0.1", 0, handshake_s=0.2)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(PATIENCE_S):
                while await reader.read(1 << 16):
                    pass
            writer.close()
        finally:
            await server.stop(None)

    with new_runner() as runner:
        runner.run(scenario())
