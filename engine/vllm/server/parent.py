"""A process of vLLM's engine ends with the server that started it, however that ended.

A server that is killed -9 says nothing to its EngineCore, which would wait for requests that cannot come and hold the KV
cache's memory. Ranks need nothing of the kind: vLLM ends those with EngineCore.
"""

import logging
import multiprocessing
import os
import select
import signal
import threading
from typing import Final

log = logging.getLogger(__name__)

GRACE_S: Final = 10.0  # for vLLM to give back its shared memory; the answers of what still runs are not read


def end_with_parent(grace_s: float = GRACE_S) -> None:
    """Watches the parent from a thread of its own. Does nothing where the engine runs in its server's own process."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # Not PR_SET_PDEATHSIG: that tells of the thread that started this process, which may end while its process goes on.
    try:
        pidfd = os.pidfd_open(parent.pid or 0)
    except ProcessLookupError:
        pidfd = -1
    except OSError as exc:
        log.warning("this process cannot watch its server, and will outlive its kill: %s", exc)
        return
    threading.Thread(target=_watch, args=(pidfd, grace_s), name="prfaas-parent", daemon=True).start()


def _watch(pidfd: int, grace_s: float) -> None:
    """`pidfd`: readable once the parent is gone, -1 if it was gone already."""
    if pidfd >= 0:
        gone = select.poll()  # a server has more files than select() takes
        gone.register(pidfd, select.POLLIN)
        gone.poll()
    log.error("the server is gone: ending")
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
