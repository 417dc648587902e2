"""A line between clusters as a process of its own: TCP relays that share one rate, which can be changed, or nothing at all.

Asked in JSON lines (benchmarks.lib.processes.GreetingChild): `{"bytes_per_s": 6e6}`, `{"bytes_per_s": 0}` for a line
that silently carries nothing. It shapes bytes from its clients to the target; the way back is free.
"""

import asyncio
import json
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, Final

PIECE_BYTES: Final = 16 * 1024
BUFFER_BYTES: Final = 64 * 1024  # of a connection here: the queue is to stand where the line's user sees it


@dataclass(slots=True)
class SharedLine:
    """One rate for all relays, first come first served."""

    bytes_per_s: float
    passed: int = 0
    _free_at: float = 0.0
    _alive: asyncio.Event = field(default_factory=asyncio.Event)

    def set_rate(self, bytes_per_s: float) -> None:
        """0: nothing passes."""
        self.bytes_per_s = bytes_per_s
        self._alive.set() if bytes_per_s else self._alive.clear()

    async def carry(self, count: int) -> None:
        """Returns when the last of `count` bytes has left at this rate."""
        await self._alive.wait()
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + count / self.bytes_per_s
        await asyncio.sleep(self._free_at - now)
        await self._alive.wait()
        self.passed += count

    async def signal(self) -> None:
        """Acknowledgements weigh nothing, but a dead line carries none."""
        await self._alive.wait()


async def _relay(line: SharedLine, port: int, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
    try:
        far, onward = await asyncio.open_connection("127.0.0.1", port, limit=PIECE_BYTES)
    except OSError:
        back.close()
        return
    ways = [asyncio.create_task(_forward(line, near, onward)), asyncio.create_task(_back(line, far, back))]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()
    await asyncio.gather(*ways, return_exceptions=True)
    onward.close()
    back.close()


async def _forward(line: SharedLine, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE_BYTES):
        await line.carry(len(piece))
        target.write(piece)
        await target.drain()


async def _back(line: SharedLine, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE_BYTES):
        await line.signal()
        target.write(piece)
        await target.drain()


def _listener() -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener


async def _serve(targets: list[int], bytes_per_s: float) -> None:
    line = SharedLine(bytes_per_s)
    line.set_rate(bytes_per_s)
    listeners = [_listener() for _ in targets]
    for listener, port in zip(listeners, targets, strict=True):

        async def relay(near: asyncio.StreamReader, back: asyncio.StreamWriter, port: int = port) -> None:
            await _relay(line, port, near, back)

        await asyncio.start_server(relay, sock=listener, limit=PIECE_BYTES)
    _say({"ports": [listener.getsockname()[1] for listener in listeners]})
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    while question := await questions.readline():
        line.set_rate(json.loads(question).get("bytes_per_s", line.bytes_per_s))
        _say({"passed": line.passed})


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve([int(port) for port in sys.argv[2:]], float(sys.argv[1])))
