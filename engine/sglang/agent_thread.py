"""The link to the agent on a thread of its own: SGLang's threads wait, and none of them has an event loop."""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

from engine.agent.link import AgentLink
from engine.errors import AgentGone
from hybrid_cache.layout.layout import ModelLayout
from transport.control.messages import BootstrapAddress

T = TypeVar("T")

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 10.0


class SglangAgentThread:
    """An event loop and the link that it keeps up. Methods may be called from any thread."""

    def __init__(
        self,
        socket: Path,
        layout: ModelLayout,
        *,
        model_id: str,
        max_model_len: int,
        http_url: str,
        notice: str = "",
        not_done_json: str = "",
        rooms: BootstrapAddress | None = None,
    ) -> None:
        self.layout: Final = layout
        self._socket = socket
        self._model_id = model_id
        self._max_model_len = max_model_len
        self._http_url = http_url
        self._notice = notice
        self._not_done_json = not_done_json
        self._rooms = rooms
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self.link: AgentLink  # belongs to the loop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="prfaas-agent", daemon=True)

    def start(self) -> None:
        """Starts the thread; the connection comes up when there is an agent. Raises TimeoutError."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError("the agent's thread did not start")

    def close(self) -> None:
        """Hangs up, and cancels what still runs on the loop."""
        if self._started.is_set() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_TIMEOUT_S)

    def wait_connected(self, timeout_s: float) -> bool:
        """Whether there is an agent within that time."""
        return self.ask(self.link.wait_connected(timeout_s), timeout_s + CLOSE_TIMEOUT_S)

    def begin(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Runs `work` on the loop. Raises AgentGone once closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # closed
            work.close()
            raise AgentGone("the server is shutting down") from None

    def ask(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """The result of `work` on the loop. Raises what it raises, TimeoutError, and AgentGone once closed."""
        future = self.begin(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise AgentGone("the server is shutting down") from None
        except TimeoutError:
            future.cancel()
            raise

    def later(self, call: Callable[[], None]) -> None:
        """Has the loop call it. Once closed it is not called: the agent has its pages back."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            log.debug("no loop any more")

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.link = AgentLink(
            self._socket,
            self.layout,
            model_id=self._model_id,
            max_model_len=self._max_model_len,
            http_url=self._http_url,
            notice=self._notice,
            not_done_json=self._not_done_json,
            rooms=self._rooms,
            on_welcome=lambda welcome: None,
            on_drain=lambda: log.info("the agent drains: running requests finish"),
            on_resume=lambda: log.info("the agent takes requests again"),
        )
        keeping_up = asyncio.create_task(self.link.run())
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            waiting = {keeping_up, *asyncio.all_tasks()} - {asyncio.current_task()}
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
