"""`python -m prfaas` is `prfaas`."""

import signal
import sys


def main() -> int:
    """The command. Ctrl-C while its modules are imported, which takes a second, ends it without a traceback."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from prfaas.cli import main as run

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
