"""What the gateway is asked for and what it sees of its clusters, for a planner: `GET /prfaas/load`."""

from collections.abc import Callable
from typing import Final, Protocol

from gateway.cluster.links import ClusterLinks
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from planner.decisions.plans.live_plan import LivePlan, PlanSetting
from planner.decisions.plans.offered import GatewayLoad, LinkReport, NodeReport, Samples
from planner.decisions.views import ClusterKind, Role

KEPT: Final = 8192  # samples of either kind: half a minute of 250 requests/s, 50 KB as JSON


class Ring(Protocol):
    """The last samples of something (`SampleRing`), of one process or of all workers together."""

    def add(self, value: int) -> None: ...
    def after(self, seq: int) -> Samples: ...


class OfferedLoad:
    """Counts what requests ask for, refused ones too: a plan made for what is served would plan the shortage on.

    `boot` names this life of the gateway; cursors of another one count from the beginning.
    """

    def __init__(self, boot: str, uncached: Ring, outputs: Ring) -> None:
        self.boot = boot
        self.uncached = uncached
        self.outputs = outputs
        self._unread = 0

    def asked(self, uncached_tokens: int) -> None:
        """A request was routed for the first time."""
        self.uncached.add(uncached_tokens)

    def answered(self, output_tokens: int) -> None:
        """An answer has ended well."""
        self.outputs.add(output_tokens)

    def refused_unread(self) -> None:
        """A request was refused before anybody knew its length."""
        self._unread += 1

    def publish(self) -> None:
        """Has other processes see what this one has counted; to be called now and then."""

    @property
    def unread(self) -> int:
        """How many were."""
        return self._unread


class LoadReporter:
    """Puts it together."""

    def __init__(
        self,
        offered: OfferedLoad,
        clusters: Clusters,
        links: ClusterLinks,
        setting: Callable[[], PlanSetting],
        followed: Callable[[], LivePlan | None],
        decode_slots: int,
    ) -> None:
        self._offered = offered
        self._clusters = clusters
        self._links = links
        self._setting = setting
        self._followed = followed
        self._decode_slots = decode_slots

    def after(self, boot: str, uncached: int, outputs: int) -> GatewayLoad:
        """What is new to a reader with these cursors, and how things are."""
        setting = self._setting()
        if boot != self._offered.boot:
            uncached = outputs = 0
        return GatewayLoad(
            boot=self._offered.boot,
            uncached=self._offered.uncached.after(uncached),
            outputs=self._offered.outputs.after(outputs),
            unread=self._offered.unread,
            threshold_tokens=setting.threshold_tokens,
            tie_share=setting.tie_share,
            nodes=tuple(self._node(node) for node in self._clusters.nodes if node.info is not None),
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
            follows=self._followed(),
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
