"""By which limits routing decides: the plan's threshold, and what is made of congestion, queues and prefixes around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from planner.decisions.defaults import DEPLOYED
from planner.decisions.views import NodeView

MOST_RATIO: Final = 4.0
MOST_PRICE: Final = 1.0  # of 0.25, 0.5 and 1 the best on the first halves of two traces


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """Limits of node choice.

    `balancing_ratio`: a prefix elsewhere is fetched only when it is longer than the node's own by this factor
    (Algorithm 1's `kvcache_balancing_threshold`; near 1 copies hot prefixes eagerly, large values compute instead). None adapts
    the balance to how busy the nodes are (`compute_price`) and to `fetch_lateness`, by how much longer late moves took than was
    predicted (`ratio`).
    `fetch_bytes_per_s`: rate of a prefix transfer inside a cluster; 0: there are no transfers. `fetch_calls_s` is what every
    one takes beside its bytes, and `fetch_delays_s` what is feared beyond that, by (source, target) node: there some failed.
    `decode_load_slack`: how much busier a decode node may be for the sake of a prefix it already holds, and how much slower
    its tokens.
    """

    balancing_ratio: float | None = None
    fetch_bytes_per_s: float = 0.0
    fetch_calls_s: float = 0.0
    fetch_delays_s: Mapping[tuple[str, str], float] = field(default_factory=dict, hash=False)
    fetch_lateness: float = 0.0
    decode_load_slack: float = DEPLOYED.decode_load_slack

    def __post_init__(self) -> None:
        if self.balancing_ratio is not None and self.balancing_ratio < 1:
            raise ValueError(f"balancing_ratio={self.balancing_ratio}: must be at least 1")
        if self.fetch_bytes_per_s < 0:
            raise ValueError(f"fetch_bytes_per_s={self.fetch_bytes_per_s}: must not be negative")

    @property
    def ratio(self) -> float:
        """The balancing ratio that holds.

        A fetch is weighed against computing by predictions already, so all that a ratio adds is caution: where these
        are right it is 1. Where moves take twice as long as predicted, a prefix elsewhere must be twice as long to be
        worth a move.
        """
        if self.balancing_ratio is not None:
            return self.balancing_ratio
        return min(MOST_RATIO, 1.0 + self.fetch_lateness)

    def compute_price(self, queues_s: Sequence[float]) -> float:
        """What a second of computing costs those who come after, in seconds: nothing while nodes are idle.

        Bounded, and a function of now alone: there is nothing in it that could swing.
        """
        if self.balancing_ratio is not None:
            return 0.0
        return MOST_PRICE * sum([queue_s > 0 for queue_s in queues_s]) / len(queues_s)

    def fetch_s(self, source: NodeView, target: NodeView, num_bytes: float) -> float:
        """Predicted time until a prefix of `num_bytes` has moved inside a cluster; there must be a rate."""
        return self.fetch_calls_s + num_bytes / self.fetch_bytes_per_s + self.fetch_delay_s(source, target)

    def fetch_delay_s(self, source: NodeView, target: NodeView) -> float:
        return self.fetch_delays_s.get((source.node_id, target.node_id), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    """The plan's threshold and the limits around it.

    `threshold_tokens` is t. `tie_share` of the requests with exactly t uncached tokens stays local; the rest goes
    remote. So a plan can split an atom of the length distribution. `cross_cluster_cache` says whether a prefix can be
    sent between clusters. The egress counts as scarce from `scarce_utilisation` on, or when what is queued takes longer
    than `scarce_drain_s`. Pressure starts at `congested_*` and is complete at `blocked_*`; meanwhile the threshold is
    multiplied by up to `congestion_factor`. Retransmissions are a pressure of their own: a commodity path shows loss
    before its rate falls. So are round trips that have grown, over the smallest ones, on a link whose senders call it
    congested: only they can tell a queue from noise. However short, a backlog that with the prompt's own KVCache
    outlasts its whole prefill at home is complete pressure. A decode node that holds a prompt's beginning may compute
    up to `increment_tokens` more, while prompts take less than `decode_prefill_share` of its time: nothing travels
    then, so it may take `increment_patience` times as long as elsewhere. 0 leaves all prompts to prefill nodes.
    `by_total_length` compares whole prompts with t, cached or not, as a router without caches would: to compare with. A
    PrfaaS queue longer than `remote_queue_s` beyond the local one sends a request back.
    """

    threshold_tokens: float
    tie_share: float = DEPLOYED.tie_share
    cross_cluster_cache: bool = False
    scarce_utilisation: float = 0.5  # half the line free still carries a prefix of a few GB within a TTFT
    scarce_drain_s: float = 0.5
    congested_utilisation: float = 0.85  # M/M/1 waiting is 5.7 services here and doubles by 0.92
    blocked_utilisation: float = 1.0
    congested_drain_s: float = 1.0
    blocked_drain_s: float = 5.0
    congested_retransmits: float = 0.01
    blocked_retransmits: float = 0.1
    congested_rtt_inflation: float = 1.5  # senders call 2 congested
    blocked_rtt_inflation: float = 4.0  # a queue of three round trips: buffers hold one or two
    congestion_factor: float = 4.0
    remote_queue_s: float = 10.0
    increment_tokens: int = 0
    increment_patience: float = 1.5
    by_total_length: bool = False
    decode_prefill_share: float = DEPLOYED.decode_prefill_share
    placement: PlacementPolicy = field(default_factory=PlacementPolicy)

    def __post_init__(self) -> None:
        if self.threshold_tokens < 0:
            raise ValueError(f"threshold_tokens={self.threshold_tokens}: must not be negative")
        if self.increment_tokens < 0:
            raise ValueError(f"increment_tokens={self.increment_tokens}: must not be negative")
        if not 0 <= self.tie_share <= 1:
            raise ValueError(f"tie_share={self.tie_share}: must be in [0, 1]")
        for name in ("utilisation", "drain_s", "retransmits", "rtt_inflation"):
            low, high = getattr(self, f"congested_{name}"), getattr(self, f"blocked_{name}")
            if not low < high:
                raise ValueError(f"congested_{name}={low}: must be below blocked_{name}={high}")
