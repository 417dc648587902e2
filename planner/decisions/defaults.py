"""What a deployment does where its configuration says nothing, once: gateways read it here, and so do plans and simulations.

What a node's cache evicts by is `hybrid_cache.eviction.choice.DEFAULT`, for the same readers.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentDefaults:
    """Where each number is explained, it is used: `RoutingPolicy`, `PlacementPolicy`, the gateway's `RoutingConfig`.

    `tail_share` is the part of a remote KVCache that has not left when its prefill ends: layers leave as they are computed.
    """

    tie_share: float = 1.0
    placement: str = "kvcache_centric"
    cross_cluster_cache: bool = False
    fetch_bytes_per_s: float = 1e9  # a NIC of 10 Gbit/s
    increment_tokens: int = 1024
    decode_prefill_share: float = 0.25  # decode at three quarters of its speed at worst
    decode_load_slack: float = 0.1
    tail_share: float = 0.02
    max_attempts: int = 3


DEPLOYED: Final = DeploymentDefaults()

TRIAL_LOAD: Final = 0.8  # of Λ, where a trial has no trace
TRIAL_REQUESTS: Final = 20_000  # which are drawn then
