"""A port for each data parallel rank of one server: an ASGI middleware of vLLM's API server.

vLLM's own balancer would choose the engine of a request, by how busy they are. Here a gateway has chosen, by what a rank's
node holds: so a request is computed by the rank whose port it came to. A client's `X-data-parallel-rank` changes nothing.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from engine.vllm.internals import ASKED_RANK, listen_also
from engine.vllm.server.answers import App, Receive, ResumeMiddleware, Send
from engine.vllm.server.seats import taken_over

log = logging.getLogger(__name__)


class RankPorts:
    """The middleware, around `answers`: vLLM warns of a flag that is given twice. `listeners`: of ranks 1 and above; the server's
    own port is that of rank 0."""

    def __init__(
        self,
        app: App,
        *,
        listeners: Sequence[socket.socket] | None = None,
        answers: Callable[[App], App] = ResumeMiddleware,
    ) -> None:
        self._app = answers(app)
        self._listeners = taken_over(os.environ) if listeners is None else listeners
        ports = (listener.getsockname()[1] for listener in self._listeners)
        self._ranks: Mapping[int, int] = {port: rank for rank, port in enumerate(ports, 1)}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            opening = asyncio.create_task(listen_also(scope["app"], self._listeners))
            opening.add_done_callback(_report_failure)
            try:
                await self._app(scope, receive, send)
            finally:
                opening.cancel()
            return
        was = ASKED_RANK.set(self.rank_of(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            ASKED_RANK.reset(was)

    def rank_of(self, scope: Mapping[str, Any]) -> int:
        """The rank whose port a request came to."""
        server = scope.get("server") or ("", 0)
        return self._ranks.get(server[1], 0)


def _report_failure(opening: "asyncio.Task[None]") -> None:
    """The nodes of these ranks find their engines silent, and start them again; the log says why."""
    if not opening.cancelled() and (error := opening.exception()) is not None:
        log.error("the ports of the other ranks could not be opened: %s", error)
