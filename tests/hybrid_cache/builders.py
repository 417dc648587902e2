"""Small layouts and prompts."""

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow

BLOCK = 4
FULL = FullAttention(bytes_per_token=64, k_bytes_per_token=32)
WINDOW = SlidingWindow(window=7, bytes_per_token=64, k_bytes_per_token=32)
STATE = LinearState(bytes_per_snapshot=700)


def make_layout(*specs: KVCacheSpec, block_size: int = BLOCK, layers: int = 1) -> ModelLayout:
    groups = tuple(
        KVCacheGroup(spec, tuple(range(i * layers, (i + 1) * layers))) for i, spec in enumerate(specs or (FULL, STATE))
    )
    return ModelLayout(model="tiny", dtype="float32", block_size=block_size, groups=groups)


def hashes_of(tokens: list[int], block_size: int = BLOCK) -> list[bytes]:
    return block_hashes(tokens, block_size, b"salt")


def reserve(
    cache: PrefixCache,
    request_id: str,
    tokens: list[int],
    *,
    purpose: Purpose = Purpose.PREFILL,
    now: float = 0.0,
) -> Reservation:
    hashes = hashes_of(tokens, cache.layout.block_size)
    return cache.reserve(request_id, hashes, len(tokens), now=now, purpose=purpose)


def prefill(cache: PrefixCache, tokens: list[int], *, now: float = 0.0) -> Reservation:
    """A whole prefill: reserve, commit, release."""
    reservation = reserve(cache, "prefill", tokens, now=now)
    cache.commit("prefill", len(tokens), now)
    cache.release("prefill", now)
    return reservation
