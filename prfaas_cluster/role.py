"""What makes a node one of a PrfaaS cluster."""

from typing import Final

from node.role import Role
from prfaas_cluster.admission import admit
from prfaas_cluster.landings import NoLandings

PRFAAS: Final = Role(kind="prfaas", admit=admit, landings=NoLandings)
