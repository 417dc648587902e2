"""Asks model servers how busy they are: their /metrics, in vLLM's names."""

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp

from gateway.picker.servers import ModelServer, ServerPool, ServerReport
from transport.control.bounded import BodyTooLong, read_bounded

PATH: Final = "/metrics"
EVERY_S: Final = 0.25
TIMEOUT_S: Final = 1.0
MAX_PAGE_BYTES: Final = 4 << 20
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
USAGE: Final = "vllm:kv_cache_usage_perc"


def read_report(page: str) -> ServerReport:
    """What a page says: engines of one server are added up, the fullest KVCache counts. Raises ValueError."""
    running = waiting = usage = 0.0
    for line in page.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line[: min((at for mark in "{ " if (at := line.find(mark)) >= 0), default=len(line))]
        if name not in (RUNNING, WAITING, USAGE):
            continue
        value = float(line.rpartition("}")[2].split()[0] if "}" in line else line.split()[1])
        if name == RUNNING:
            running += value
        elif name == WAITING:
            waiting += value
        else:
            usage = max(usage, value)
    return ServerReport(running=int(running), waiting=int(waiting), kv_usage=usage)


class ReportAsker:
    """Asks every server, again and again. One that does not answer holds up no other."""

    def __init__(self, pool: ServerPool, on_report: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._pool = pool
        self._on_report = on_report
        self._every_s = every_s
        self._asked: set[ModelServer] = set()  # those whose answer has not come: none is asked twice at once

    async def run(self) -> None:
        """For ever."""
        self._asked.clear()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)  # one a server
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as asking,
        ):
            while True:
                for server in set(self._pool) - self._asked:
                    self._asked.add(server)
                    asking.create_task(self._ask(session, server))
                await asyncio.sleep(self._every_s)

    async def _ask(self, session: aiohttp.ClientSession, server: ModelServer) -> None:
        try:
            async with session.get(f"http://{server.address}{PATH}", allow_redirects=False) as response:
                response.raise_for_status()
                page = await read_bounded(response.content.iter_any(), MAX_PAGE_BYTES)
            report = read_report(page.decode("utf-8", "replace"))
        except (aiohttp.ClientError, TimeoutError, OSError):
            outcome = "unreachable"
        except (ValueError, IndexError, OverflowError, BodyTooLong):
            outcome = "unreadable"
        else:
            outcome = "read"
            self._pool.reported(server, report)
        finally:
            self._asked.discard(server)
        if outcome != "read":
            self._pool.failed(server)
        self._on_report(outcome)
