"""`python -m engine`."""

import signal
import sys

from engine.main import main

if __name__ == "__main__":
    status = main()
    # Unloading torch takes a moment, in which a second SIGTERM must not turn a clean end into a kill.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(status)
