"""`python -m pd_cluster -c FILE.toml`: one node, agent and engine."""

import sys
from collections.abc import Sequence

from node.main import node_main
from pd_cluster.admission import admit


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the node until SIGTERM; returns the exit status."""
    return node_main("pd_cluster", "Runs one node of a local PD cluster: agent and engine.", "pd", admit, argv)


if __name__ == "__main__":
    sys.exit(main())
