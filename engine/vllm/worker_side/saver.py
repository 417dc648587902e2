"""A rank's copies out of vLLM's blocks, on a thread beside the model; the model waits for those of its step, and not for ever.

On a device a copy is over later than its submission: the thread submits, and what has been written is announced once the
device has got there. The model waits for submissions, and its device for the copies.

When a step ends vLLM may give its blocks to others, so a copy that is late reads what is no longer the job's. The saver
then gives its job up: it never announces what the copy has written, and tells the scheduler's side that the save
failed. The pages stay with the job until the copy has let go of them. Nothing here raises into the model's step.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from engine.errors import PagesInvalid
from engine.vllm.scheduler_side.steps import SaveFailed
from engine.vllm.worker_side.device import OVER, Mark
from engine.vllm.worker_side.watcher import MarkWatcher
from transport.control.messages import ControlMessage

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S: Final = 30.0  # copies of one step are a few hundred MB at most
MAX_GIVEN_UP: Final = 4096  # remembered; a job whose save has failed asks for a few more steps at most


class Saver:
    """Saves of one step after another. Methods belong to the model's thread, but for `announce` and `forget`."""

    def __init__(
        self,
        say: Callable[[ControlMessage], None],
        timeout_s: float = SAVE_TIMEOUT_S,
        *,
        max_given_up: int = MAX_GIVEN_UP,
    ) -> None:
        """`say` must not wait: it is called between the model's steps."""
        self._say = say
        self._max_given_up = max_given_up
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(1, "prfaas-save")
        self._watcher = MarkWatcher()
        self._lock = threading.Lock()  # _given_up, and what is said of a job before it is
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._pending: dict[Future[None], str] = {}
        self._late: dict[Future[None], str] = {}  # replaced, never changed: the copying thread looks at it, too

    @property
    def num_given_up(self) -> int:
        """Jobs that are remembered as such."""
        return len(self._given_up)

    def submit(self, job: str, copy: Callable[[], None]) -> None:
        """Runs a copy on the thread, unless its job has been given up. One that raises gives its job up."""
        if self._is_late():
            self.give_up(job, "copies of an earlier step have not ended")
        elif not self._has_given_up(job):
            self._pending[self._pool.submit(self._run, job, copy)] = job

    def wait(self) -> int:
        """Ends with the last copy of this step, or gives up what is not there in time; returns how many jobs."""
        if not self._pending:
            return 0
        late = wait(self._pending, self._timeout_s).not_done
        jobs = sorted({self._pending[future] for future in late})
        self._late = self._late | {future: self._pending[future] for future in late if not future.cancel()}
        self._pending.clear()
        for job in jobs:
            self.give_up(job, f"not copied within {self._timeout_s} s")
        return len(jobs)

    def announce(self, job: str, message: ControlMessage, mark: Mark = OVER) -> None:
        """Says what has been written once `mark` is over. Raises PagesInvalid where that does not hold even now."""
        if self._has_given_up(job):
            raise PagesInvalid("the save was given up")
        self._watcher.when_over(
            mark,
            lambda: self._say_unless_given_up(job, message),
            lambda error: self.give_up(job, f"{type(error).__name__}: {error}"),
        )

    def _say_unless_given_up(self, job: str, message: ControlMessage) -> None:
        with self._lock:
            if job not in self._given_up:
                self._say(message)

    def give_up(self, job: str, reason: str) -> None:
        """Nothing of the job is announced from here on."""
        with self._lock:
            if job in self._given_up:
                return
            self._given_up[job] = None
            self._forget_the_oldest()
            self._say(SaveFailed(job=job, reason=reason))
        log.error("job=%s cannot be saved: %s", job, reason)

    def forget(self, job: str) -> None:
        """The job is over and no copy of it runs."""
        with self._lock:
            self._given_up.pop(job, None)

    def close(self) -> None:
        self._pool.shutdown(wait=not self._is_late(), cancel_futures=True)
        self._watcher.close()

    def _run(self, job: str, copy: Callable[[], None]) -> None:
        try:
            copy()
        except PagesInvalid as exc:
            log.debug("job=%s is over: %s", job, exc)
        except Exception as exc:
            log.exception("job=%s", job)
            self.give_up(job, f"{type(exc).__name__}: {exc}")

    def _forget_the_oldest(self) -> None:
        """Jobs whose end is not reported; but not one whose copy may still announce what it has written."""
        if len(self._given_up) > self._max_given_up:
            late = set(self._late.values())
            del self._given_up[next(job for job in self._given_up if job not in late)]

    def _has_given_up(self, job: str) -> bool:
        with self._lock:
            return job in self._given_up

    def _is_late(self) -> bool:
        self._late = {future: job for future, job in self._late.items() if not future.done()}
        return bool(self._late)
