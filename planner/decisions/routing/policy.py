"""By which limits routing decides: the plan's threshold, and what is made of congestion, queues and prefixes around it."""

from dataclasses import dataclass, field

from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.placement import PlacementPolicy


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
