"""Eviction policies: which cached block leaves when room is needed."""

from hybrid_cache.eviction.base import EvictionPolicy, Key, Use
from hybrid_cache.eviction.choice import POLICIES, default_policy

__all__ = ["POLICIES", "EvictionPolicy", "Key", "Use", "default_policy"]
