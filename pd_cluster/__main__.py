"""`python -m pd_cluster -c FILE.toml`: one node, agent and engine."""

import os
import signal
import sys
from collections.abc import Sequence

from transport.control.grpc_environment import for_grpc

os.environ.update(for_grpc(os.environ))
if __name__ == "__main__":
    # As early: until the node can read its file again, SIGHUP has nothing to say, and must not end it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

from node.main import node_main
from pd_cluster.role import PD


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the node until SIGTERM; returns the exit status."""
    return node_main("pd_cluster", "Runs one node of a local PD cluster: agent and engine.", PD, argv)


if __name__ == "__main__":
    sys.exit(main())
