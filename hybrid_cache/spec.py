"""What one layer keeps between tokens: the kinds of KVCache that hybrid models mix."""

from dataclasses import dataclass


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, not {value}")


@dataclass(frozen=True, slots=True)
class FullAttention:
    """K and V (or an MLA latent) of every token of one layer; a prefix of any length can be reused.

    `bytes_per_token` counts K and V together; the first `k_bytes_per_token` of them are K.
    """

    bytes_per_token: int
    k_bytes_per_token: int

    def __post_init__(self) -> None:
        _require_positive(bytes_per_token=self.bytes_per_token, k_bytes_per_token=self.k_bytes_per_token)
        if self.k_bytes_per_token > self.bytes_per_token:
            raise ValueError("k_bytes_per_token exceeds bytes_per_token")


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """K and V of one layer whose tokens see the last `window` ones, themselves included; reuse needs `window - 1`."""

    window: int
    bytes_per_token: int
    k_bytes_per_token: int

    def __post_init__(self) -> None:
        _require_positive(
            window=self.window, bytes_per_token=self.bytes_per_token, k_bytes_per_token=self.k_bytes_per_token
        )
        if self.k_bytes_per_token > self.bytes_per_token:
            raise ValueError("k_bytes_per_token exceeds bytes_per_token")


@dataclass(frozen=True, slots=True)
class LinearState:
    """A recurrent state of one layer, its convolution state included; a snapshot serves its exact length only."""

    bytes_per_snapshot: int

    def __post_init__(self) -> None:
        _require_positive(bytes_per_snapshot=self.bytes_per_snapshot)


KVCacheSpec = FullAttention | SlidingWindow | LinearState
