"""`python -m gateway`."""

import os
import signal
import sys

from transport.control.grpc_environment import for_grpc

os.environ.update(for_grpc(os.environ))
if __name__ == "__main__":
    # Before anything else is imported, which takes a second: until the gateway can read its file again, there is nothing to do.
    for number in (signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

from gateway.main import main

if __name__ == "__main__":
    sys.exit(main())
