"""Waits for marks of a device beside the threads that give it work, and does then what was to be done."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from engine.vllm.worker_side.device import Mark

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 10.0


class MarkWatcher:
    """In the order in which it is told, which one thread does. Where nothing has to be waited for, that thread does it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # _pending, _thread
        self._pending = 0
        self._queue: queue.SimpleQueue[tuple[Mark, Callable[[], None], Callable[[Exception], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def when_over(self, mark: Mark, then: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Calls `then` once `mark` is over and all before it is done; `failed` if the device cannot get there."""
        with self._lock:
            at_once = not self._pending and mark.is_over()
            if not at_once:
                self._pending += 1
                self._queue.put((mark, then, failed))
                self._begin()
        if at_once:
            then()

    def close(self) -> None:
        """Ends with what was to be done, unless the device hangs."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="prfaas-watch", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while (entry := self._queue.get()) is not None:
            mark, then, failed = entry
            try:
                mark.wait()
                then()
            except Exception as exc:
                log.exception("what was to be done after a mark of the device has failed")
                failed(exc)
            finally:
                with self._lock:
                    self._pending -= 1
