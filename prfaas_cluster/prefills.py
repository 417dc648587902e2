"""What makes a node prefill for others: the same in every kind of cluster."""

import time

from node.config import NodeConfig
from node.kvcache.pages import ArenaPages
from node.transfer.reach import PeerReach
from node.transfer.services import AdmitLeg, Clock, PrefillService
from prfaas_cluster.egress_shares import EgressShares
from prfaas_cluster.legs import PrefillLegs, PrefillSender
from prfaas_cluster.links import EgressLinks


def prefill_service(config: NodeConfig, reach: PeerReach) -> PrefillService:
    """The sending end of a node's links, leases of its budgets, and what opens legs once there are pages."""
    links, coding = EgressLinks(config, reach), config.codings()

    def open_legs(pages: ArenaPages, now: Clock, admit: AdmitLeg) -> PrefillLegs:
        return PrefillLegs(PrefillSender(pages, links, coding), now, admit)

    return PrefillService(egress=links, shares=EgressShares(links.client, time.monotonic), open_legs=open_legs)
