"""What a model is asked for and what the gateway sees of its nodes, for the planner of that model: `GET /prfaas/load`."""

from gateway.cluster.links import ClusterLinks
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.models.served import ModelParts
from planner.decisions.plans.offered import GatewayLoad, LinkReport, NodeReport
from planner.decisions.views import ClusterKind, Role


class LoadReporter:
    """Puts it together."""

    def __init__(self, clusters: Clusters, links: ClusterLinks, decode_slots: int) -> None:
        self._clusters = clusters
        self._links = links
        self._decode_slots = decode_slots

    def after(self, parts: ModelParts, boot: str, uncached: int, outputs: int) -> GatewayLoad:
        """What is new of a model to a reader with these cursors, and how its nodes and all links are."""
        setting, offered = parts.router.setting, parts.offered
        if boot != offered.boot:
            uncached = outputs = 0
        return GatewayLoad(
            boot=offered.boot,
            uncached=offered.uncached.after(uncached),
            outputs=offered.outputs.after(outputs),
            unread=offered.unread,
            threshold_tokens=setting.threshold_tokens,
            tie_share=setting.tie_share,
            nodes=tuple(
                self._node(node) for node in self._clusters.nodes if node.info is not None and node.model == parts.key
            ),
            links=tuple(
                LinkReport(
                    source=view.source,
                    destination=view.destination,
                    up=view.up,
                    rate_bytes_per_s=view.rate_bytes_per_s,
                    utilisation=view.utilisation,
                    congested=view.congested,
                )
                for view in self._links.views()
            ),
            follows=parts.follower.plan,
        )

    def _node(self, node: ClusterNode) -> NodeReport:
        assert node.info is not None
        role = Role(node.info.role)
        return NodeReport(
            node_id=node.id,
            agent=node.agent.address,
            cluster=node.cluster,
            kind=ClusterKind(node.info.cluster_kind),
            role=role,
            state=node.state,
            running=node.load.running,
            waiting=node.load.waiting,
            queued_tokens=node.load.queued_tokens,
            slots=self._decode_slots if role is Role.DECODE else 1,
        )
