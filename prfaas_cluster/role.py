"""What makes a node one of a PrfaaS cluster."""

from typing import Final

from node.role import NodeRole
from prfaas_cluster.admission import admit, admit_leg
from prfaas_cluster.conversions import conversions
from prfaas_cluster.landings import NoLandings

PRFAAS: Final = NodeRole(
    kind="prfaas", admit=admit, admit_leg=admit_leg, landings=NoLandings, conversions=conversions
)  # fmt: skip
