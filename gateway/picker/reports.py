"""Asks model servers how busy they are, by their /metrics in vLLM's names, and now and then which models they serve."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from gateway.picker.servers import ModelServer, ServerPool, ServerReport
from transport.control.bounded import BodyTooLong, read_bounded
from transport.wire.asked_servers import AskedNodes

PATH: Final = "/metrics"
MODELS: Final = "/v1/models"
MODELS_EVERY_S: Final = 5.0
MAX_MODELS_BYTES: Final = 1 << 20
EVERY_S: Final = 0.25
TIMEOUT_S: Final = 1.0
MAX_PAGE_BYTES: Final = 4 << 20
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
USAGE: Final = "vllm:kv_cache_usage_perc"


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


_CARDS: Final = msgspec.json.Decoder(_Cards)


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

    def __init__(
        self,
        pool: ServerPool,
        on_report: Callable[[str], None],
        every_s: float = EVERY_S,
        nodes: AskedNodes | None = None,
    ) -> None:
        """`nodes` asks PrfaaS nodes over mutual TLS; None: they are asked in clear, as all others are."""
        self._nodes = nodes
        self._pool = pool
        self._on_report = on_report
        self._every_s = every_s
        self._asked: set[ModelServer] = set()  # those whose answer has not come: none is asked twice at once
        self._said_at: WeakKeyDictionary[ModelServer, float] = WeakKeyDictionary()  # which models it has

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
            async with self._got(session, server, PATH) as response:
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
            await self._ask_models(session, server)
        finally:
            self._asked.discard(server)
        if outcome != "read":
            self._said_at.pop(server, None)  # it may be another one when it is back
            self._pool.failed(server)
        self._on_report(outcome)

    def _got(self, session: aiohttp.ClientSession, server: ModelServer, path: str) -> AbstractAsyncContextManager[Any]:
        """A question to one server. Raises OSError where our own certificate cannot be read."""
        if self._nodes is None or not server.is_node:
            return session.get(f"http://{server.address}{path}", allow_redirects=False)
        secure = self._nodes.context()
        return session.get(f"https://{server.address}{path}", allow_redirects=False, ssl=secure)

    async def _ask_models(self, session: aiohttp.ClientSession, server: ModelServer) -> None:
        """A server that does not answer keeps what it said before. One that has never said may be asked for each model."""
        now = asyncio.get_running_loop().time()
        if now - self._said_at.get(server, -MODELS_EVERY_S) < MODELS_EVERY_S:
            return
        self._said_at[server] = now
        try:
            async with self._got(session, server, MODELS) as response:
                response.raise_for_status()
                cards = _CARDS.decode(await read_bounded(response.content.iter_any(), MAX_MODELS_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._on_report("models_unreachable")
        except (msgspec.DecodeError, UnicodeDecodeError, BodyTooLong):
            self._on_report("models_unreadable")
        else:
            self._pool.serves(server, [card.id for card in cards.data])
