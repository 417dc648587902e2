"""The end of a server whose scheduler is gone: SGLang's front end notices seconds later, and so do its clients."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from node.engine.liveness import has_ended

log = logging.getLogger(__name__)

LOOK_S: Final = 0.02
LOOKS: Final = 100  # a process that dies lets go of its sockets first


class Servers(Protocol):
    """Who starts a node's server, and can kill it."""

    @property
    def pid(self) -> int | None: ...
    def kill(self) -> None: ...


async def end_headless(servers: Servers, scheduler: int, is_joined: Callable[[], bool]) -> None:
    """Kills the server that runs now if process `scheduler` of it, which has hung up, has ended; not if another one joins."""
    server = servers.pid
    for _ in range(LOOKS):
        if is_joined() or servers.pid != server:
            return
        if has_ended(scheduler):
            log.error("engine killed pid=%s: its scheduler pid=%d is gone", server, scheduler)
            servers.kill()
            return
        await asyncio.sleep(LOOK_S)
