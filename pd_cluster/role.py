"""What makes a node one of a PD cluster: all that a PrfaaS node does, and decode, and changes of role."""

from collections.abc import Callable
from typing import Final

from node.config import ENGINES_OF_ONE_ROLE
from node.fixed_role import FixedRole
from node.role import Conversions, Convertible, NodeRole
from node.transfer.incoming import IncomingTransfers
from pd_cluster.admission import admit, admit_leg
from pd_cluster.converter import RoleConverter
from pd_cluster.landings import DecodeLandings
from pd_cluster.reservations import DecodePages
from prfaas_cluster.prefills import prefill_service


def decodes(incoming: IncomingTransfers) -> DecodeLandings:
    """Decode reservations among the node's, and the engine's claims to them."""
    return DecodeLandings(DecodePages(incoming))


def conversions(node: Convertible, now: Callable[[], float]) -> Conversions:
    """The way to the other role, where the engine can go it while it runs."""
    if node.config.engine in ENGINES_OF_ONE_ROLE:
        return FixedRole(node.config, f"has an engine {node.config.engine!r}, which is started for one role")
    return RoleConverter(node, now)


PD: Final = NodeRole(
    kind="pd",
    admit=admit,
    admit_leg=admit_leg,
    prefills=prefill_service,
    decodes=decodes,
    conversions=conversions,
)
