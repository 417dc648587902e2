"""What makes a node one of a PrfaaS cluster: it prefills for others, and only that."""

from typing import Final

from node.role import NodeRole
from prfaas_cluster.admission import admit, admit_leg
from prfaas_cluster.conversions import conversions
from prfaas_cluster.no_decodes import NoDecodes
from prfaas_cluster.prefills import prefill_service

PRFAAS: Final = NodeRole(
    kind="prfaas",
    admit=admit,
    admit_leg=admit_leg,
    prefills=prefill_service,
    decodes=NoDecodes,
    conversions=conversions,
)
