"""`python -m prfaas_cluster -c FILE.toml`: one node, agent and engine."""

import sys
from collections.abc import Sequence

from node.main import node_main
from prfaas_cluster.admission import admit


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the node until SIGTERM; returns the exit status."""
    return node_main(
        "prfaas_cluster", "Runs one prefill node of a PrfaaS cluster: agent and engine.", "prfaas", admit, argv
    )


if __name__ == "__main__":
    sys.exit(main())
