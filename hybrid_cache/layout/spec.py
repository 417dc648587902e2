"""What one layer keeps between tokens: the kinds of KVCache that hybrid models mix."""

from dataclasses import dataclass


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, not {value}")


@dataclass(frozen=True, slots=True)
class FullAttention:
    """K and V (or an MLA latent) of every token of one layer; a prefix of any length can be reused.

    `bytes_per_token` counts K and V together; the first `k_bytes_per_token` of them are K. `k_vector` and `v_vector` are the
    elements of one head, of the layout's dtype; 0 where the engine does not say.
    """

    bytes_per_token: int
    k_bytes_per_token: int
    k_vector: int = 0
    v_vector: int = 0

    def __post_init__(self) -> None:
        _require_positive(bytes_per_token=self.bytes_per_token, k_bytes_per_token=self.k_bytes_per_token)
        if self.k_bytes_per_token > self.bytes_per_token:
            raise ValueError("k_bytes_per_token exceeds bytes_per_token")


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """K and V of one layer whose tokens see the last `window` ones, themselves included; reuse needs `window - 1`.

    Bytes and vectors are those of FullAttention.
    """

    window: int
    bytes_per_token: int
    k_bytes_per_token: int
    k_vector: int = 0
    v_vector: int = 0

    def __post_init__(self) -> None:
        _require_positive(
            window=self.window, bytes_per_token=self.bytes_per_token, k_bytes_per_token=self.k_bytes_per_token
        )
        if self.k_bytes_per_token > self.bytes_per_token:
            raise ValueError("k_bytes_per_token exceeds bytes_per_token")


@dataclass(frozen=True, slots=True)
class LinearState:
    """A recurrent state of one layer, its convolution state included; a snapshot serves its exact length only.

    `parts` are the states that it consists of, one after the other: (bytes, dtype, elements of the last axis); empty where
    the engine does not say.
    """

    bytes_per_snapshot: int
    parts: tuple[tuple[int, str, int], ...] = ()

    def __post_init__(self) -> None:
        _require_positive(bytes_per_snapshot=self.bytes_per_snapshot)
        if self.parts and sum(num_bytes for num_bytes, _, _ in self.parts) != self.bytes_per_snapshot:
            raise ValueError(f"parts {self.parts} are not {self.bytes_per_snapshot} bytes together")


KVCacheSpec = FullAttention | SlidingWindow | LinearState
