"""Takes callers of one port in as they come, and leaves them waiting while this process can open no more sockets."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

BACKLOG: Final = 128
PAUSE_S: Final = 0.5

Take = Callable[[socket.socket, str], None]  # is given a socket that does not block, and its address


class AcceptLoop:
    """Gives each caller to `take`, from the moment it is made until `close`."""

    def __init__(self, listener: socket.socket, take: Take, whose: str, pause_s: float = PAUSE_S) -> None:
        """Inside an event loop. The listener is its own from now on; `whose` says in the log what the callers call."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._take = take
        self._whose = whose
        self._pause_s = pause_s
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Takes no more callers; once."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                caller, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as exc:  # no descriptor, no memory: others may give theirs back
                log.error("callers of %s wait for %g s: %s", self._whose, self._pause_s, exc)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(self._pause_s, self._listen)
                return
            caller.setblocking(False)
            self._take(caller, peer[0])
