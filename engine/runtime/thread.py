"""The one thread that computes. The event loop hands it work through a queue and hears events back."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from engine.errors import EngineError
from engine.runtime.scheduler import Keep, ModelWork, Scheduler, SchedulerLoad, WorkFailed
from engine.runtime.steps import Steps

log = logging.getLogger(__name__)

_STOP: Final = None
_WAKE: Final = "wake"


class ModelThread:
    """Runs a scheduler until it is stopped. While there is nothing to do it sleeps on the queue."""

    def __init__(
        self,
        scheduler: Scheduler,
        on_load: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._scheduler = scheduler
        self._on_load = on_load
        self._on_death = on_death
        self._fresh: list[ModelWork] = []
        self._inbox: queue.SimpleQueue[ModelWork | Keep | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._load = scheduler.load
        self._stopping = False
        self._ended = False

    @property
    def load(self) -> SchedulerLoad:
        """As of the last round, with what has been submitted since. Of the event loop's thread."""
        self._fresh = [work for work in self._fresh if not (work.received or work.aborted)]
        fresh_tokens = sum(work.remaining_tokens for work in self._fresh)
        last = self._load
        return SchedulerLoad(last.running, last.waiting + len(self._fresh), last.queued_tokens + fresh_tokens)

    @property
    def slots(self) -> int:
        return self._scheduler.slots

    @property
    def steps(self) -> Steps:
        return self._scheduler.steps.report()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: ModelWork | Keep) -> None:
        if isinstance(work, ModelWork):
            self._fresh.append(work)
        self._inbox.put(work)
        if self._ended:
            self._refuse_rest()

    def wake(self) -> None:
        """The engine has made progress. Any thread."""
        self._inbox.put(_WAKE)

    def set_chunk_tokens(self, chunk_tokens: int) -> None:
        self._scheduler.chunk_tokens = chunk_tokens

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the present round; running requests fail."""
        self._stopping = True
        self._inbox.put(_STOP)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._receive()
                self._scheduler.step()
                self._publish_load()
        except Exception:
            log.exception("the model thread ends")
            self._on_death()
        finally:
            self._scheduler.fail_all(EngineError("the engine is shutting down"))
            self._ended = True
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """For what comes in when nothing is computed any more; the last one to look sees it."""
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._inbox.get_nowait()
                if isinstance(work, ModelWork | Keep):
                    work.emit(WorkFailed(EngineError("the engine is shutting down")))

    def _publish_load(self) -> None:
        load = self._scheduler.load
        if load != self._load:
            self._load = load
            self._on_load()

    def _receive(self) -> None:
        """Takes new work; waits for it when there is nothing to compute."""
        block = self._scheduler.idle
        while True:
            try:
                work = self._inbox.get(block=block)
            except queue.Empty:
                return
            if work is _STOP:
                return
            if isinstance(work, ModelWork | Keep):
                self._scheduler.add(work)
            block = False
