"""Listeners, and how many descriptors they may take."""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from gateway.config.gateway import GatewayConfig
from gateway.errors import CannotListen
from gateway.http.connections import ALWAYS, ClientConnection, Gate, Way, nameless, shaped
from gateway.http.tls import Handshaking, SecureConnection, ServerCertificate
from transport.path.tcp import format_address

log = logging.getLogger("prfaas.gateway.listen")

BACKLOG: Final = 128  # accepted at once, so this many more than the limit may be open for a moment
OPERATORS: Final = 64  # connections of the operators' listener
OTHER_DESCRIPTORS: Final = 2 * BACKLOG + OPERATORS + 128  # agents' channels, processes, files
HANDSHAKE_S: Final = 15.0  # until TLS must be agreed on
LINGER_S: Final = 5.0  # how long the rest of a refused body is read, so that the client sees its answer


def client_connections(config: GatewayConfig, descriptors: int) -> int:
    """How many connections of clients may be open, so that everything else gets its descriptors out of so many."""
    free = descriptors - 2 * config.max_in_flight - OTHER_DESCRIPTORS
    possible = max(descriptors // 4, free)
    wanted = config.strangers.divided(config.workers).max_connections
    if wanted > possible:
        log.warning("max_connections=%d: only %d of %d descriptors are free for them", wanted, possible, descriptors)
    return min(wanted or possible, possible)


class Listener:
    """An application that answers on a port; `url` says where. `handshaking` are connections that agree on TLS still."""

    def __init__(
        self, runner: web.AppRunner, servers: Sequence[asyncio.Server], url: str, handshaking: Handshaking
    ) -> None:
        self.url = url
        self.handshaking = handshaking
        self._runner = runner
        self._servers = servers

    @classmethod
    async def start(
        cls,
        app: web.Application,
        gate: Gate,
        host: str,
        port: int,
        idle_s: float,
        *,
        straight: Mapping[str, Way] = MappingProxyType({}),
        sockets: Sequence[socket.socket] = (),
        certificate: ServerCertificate | None = None,
        header_s: float = HANDSHAKE_S,
        strict_transport: str = "",
    ) -> "Listener":
        """Listens on `host:port` (0: any free port), or on `sockets` that are bound already. Raises CannotListen.

        What is POSTed to the paths of `straight` goes around the application. With a `certificate` clients speak TLS, and
        have `header_s` to agree on it. `strict_transport` is what browsers remember then; "": nothing.
        """
        # A client that leaves ends its request here and on the nodes.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        http = runner.server
        assert http is not None
        http.request_handler = shaped(http.request_handler, straight)
        http.request_factory = nameless(http.request_factory)
        loop = asyncio.get_running_loop()

        # Idle connections are the gate's to close; aiohttp's own timer stands behind it.
        options: dict[str, Any] = {
            "loop": loop, "access_log": None, "keepalive_timeout": 2 * idle_s, "lingering_time": LINGER_S,
            "auto_decompress": False, "always": ALWAYS,
        }  # fmt: skip
        if certificate is not None and strict_transport:
            options["always"] = {**ALWAYS, "Strict-Transport-Security": strict_transport}
        secure = Handshaking(gate, loop.time)

        def connection() -> ClientConnection:
            if certificate is None:
                return ClientConnection(gate, http, **options)
            return SecureConnection(gate, http, certificate.context, header_s, secure, **options)

        ways: Sequence[dict[str, Any]] = [{"sock": each} for each in sockets] or [{"host": host, "port": port}]
        servers: list[asyncio.Server] = []
        try:
            for way in ways:
                servers.append(await loop.create_server(connection, backlog=BACKLOG, **way))
        except OSError as error:
            for server in servers:
                server.close()
            await runner.cleanup()
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CannotListen(
                f"cannot listen on {format_address(host, port)}: {reason}; choose another port"
            ) from error
        bound_host, bound_port = servers[0].sockets[0].getsockname()[:2]
        scheme = "http" if certificate is None else "https"
        return cls(runner, servers, f"{scheme}://{format_address(bound_host, bound_port)}", secure)

    @property
    def app(self) -> web.Application:
        """What answers."""
        return self._runner.app

    def close_port(self) -> None:
        """Takes no more connections; those there are go on."""
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        """Stops listening, and ends what is under way."""
        self.close_port()
        for connection in self.handshaking:
            connection.end()
        await self._runner.cleanup()
