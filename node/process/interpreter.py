"""Python's own settings, for a process whose event loop must not stand still."""

import gc
import sys
from typing import Final

COLLECT_AFTER: Final = 20_000  # objects; a request leaves few in circles
YOUNG: Final = 2  # such collections until the objects of both are looked at again: some milliseconds
OLD: Final = 500  # of those until all objects are: 200,000 runs of cached blocks, which are in no circles, take 0.2 s
SWITCH_INTERVAL_S: Final = 0.001  # after which a thread that moves bytes lets the event loop go on; Python: 5 ms


def favour_the_loop() -> None:
    """Once, when all modules are there: no collection need look at what is here now, nor one come every few requests."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, YOUNG, OLD)
