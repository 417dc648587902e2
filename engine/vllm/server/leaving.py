"""How processes of vLLM end: at once, when they have ended their work in order.

EngineCore and its workers are spawned. When vLLM has taken down its queues, groups and memory, Python takes down all
modules and objects as well. With torch, transformers and vLLM that takes a second or two in each process, one after the
other, for no gain. Forked children of multiprocessing never do that (`multiprocessing.popen_fork` ends them by
`os._exit`); these do not either.
"""

import atexit
import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Final, NoReturn

OUTPUT_S: Final = 1.0  # for the last words of an engine to be taken by who sends them
POLL_S: Final = 0.01
FLIGHT_S: Final = 0.05  # of what was taken: ZMQ sends on a thread of its own


def leave_at_once(is_unsent: Callable[[], bool] | None = None) -> None:
    """This process ends once its `main` has returned. `is_unsent`: whether it has words left that another thread is to send.

    Called while it ends for an error that its exit status is to tell, this changes nothing; and should one come later, the
    process is taken apart as ever, and tells it.
    """
    error = sys.exc_info()[1]
    if error is None or (isinstance(error, SystemExit) and not error.code):
        gc.collect = _collect_nothing  # vLLM has it look at all it ever made, on its way out
        atexit.register(_leave, is_unsent, _statuses())


def _statuses() -> list[object]:
    """Records the exit status of this process from now on; the last one counts. `multiprocessing.spawn` asks each child
    so."""
    asked, leave = list[object](), sys.exit

    def leave_with(status: object = None, /) -> NoReturn:
        asked.append(status)
        leave(status)  # type: ignore[arg-type]

    sys.exit = leave_with
    return asked


def _collect_nothing(generation: int = 2) -> int:
    return 0


def _leave(is_unsent: Callable[[], bool] | None, statuses: list[object]) -> None:
    if not statuses or statuses[-1]:  # in order is what has said so
        return
    if is_unsent is not None:
        deadline = time.monotonic() + OUTPUT_S
        while is_unsent() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        time.sleep(FLIGHT_S)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)
