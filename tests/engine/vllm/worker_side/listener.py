"""The scheduler's end of a rank's socket, which notes what it hears."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.vllm.scheduler_side.steps import RankMessage
from engine.vllm.worker_side.ranks import RankServer

WAIT_S = 60.0


class Scheduler:
    """The scheduler's end of the local socket, on a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ranks.sock"
        self.heard: list[RankMessage] = []
        self._news = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = RankServer(self.path, self._hear, ranks=1)
        self._run(self._server.start())

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def _hear(self, rank: int, message: RankMessage) -> None:
        with self._news:
            self.heard.append(message)
            self._news.notify_all()

    def wait_for(self, kind: type, job: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self._has(kind, job), WAIT_S), self.heard

    def wait_for_count(self, kind: type, job: str, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self._count(kind, job) >= count, WAIT_S), self.heard

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """`holds` looks at what has been heard."""
        with self._news:
            assert self._news.wait_for(holds, WAIT_S), self.heard

    def _has(self, kind: type, job: str) -> bool:
        return self._count(kind, job) > 0

    def _count(self, kind: type, job: str) -> int:
        return sum(isinstance(message, kind) and message.job == job for message in self.heard)

    async def _close(self) -> None:
        await self._server.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    def release(self, job: str) -> None:
        self._run(self._server.release(job))

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()
