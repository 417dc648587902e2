"""Ctrl-C while a command's modules are imported, which takes a second: it ends without a traceback. Imports next to nothing."""

import signal

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable


def run_imported(load: "Callable[[], Callable[[], int]]") -> int:
    """Runs what `load` imports; from then on Ctrl-C is the command's own affair."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = load()
    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
