"""HBM of one instance: what its weights leave for KVCache."""

from dataclasses import dataclass
from typing import Final

from planner.errors import InputError
from planner.model.reading import SHARE, Range

ERROR: Final = Range(0, 10.0)  # how far a figure may be off, as a share of it
HBM: Final = Range(0, 1e14, "bytes")
GPU_COUNT: Final = Range(1, 100_000, "GPUs", is_whole=True)
COPIES: Final = Range(1, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """`weights_bytes` are those of all GPUs of the instance; engines use `usable_share` of the memory.

    Tensor parallelism over more GPUs than there are KV heads keeps `kv_copies` of KVCache; states it divides.
    """

    gpus: int
    hbm_bytes_per_gpu: float
    weights_bytes: float
    usable_share: float = 0.9
    kv_copies: float = 1.0
    provenance: str = "unverified: not stated"
    error: float | None = None

    def __post_init__(self) -> None:
        GPU_COUNT.of("gpus", self.gpus)
        HBM.above_low("hbm_bytes_per_gpu", self.hbm_bytes_per_gpu)
        HBM.of("weights_bytes", self.weights_bytes)
        SHARE.above_low("usable_share", self.usable_share)
        COPIES.of("kv_copies", self.kv_copies)
        if self.error is not None:
            ERROR.of("error", self.error)
        if self.kv_bytes <= 0:
            raise InputError(
                f"weights_bytes={self.weights_bytes:.4g}: {self.weights_bytes / 1e9:,.0f} GB of weights leave no room for "
                f"KVCache in {self.gpus} GPUs of {self.hbm_bytes_per_gpu / 1e9:.4g} GB each, {self.usable_share:.0%} of it usable"
            )

    @property
    def kv_bytes(self) -> float:
        """Room for KVCache on all GPUs together."""
        return self.gpus * self.hbm_bytes_per_gpu * self.usable_share - self.weights_bytes

    def needed_bytes(self, kv_bytes: float, state_bytes: float = 0.0) -> float:
        """What a request with so much KVCache takes of all GPUs together; its states are not copied."""
        return (kv_bytes - state_bytes) * self.kv_copies + state_bytes

    def requests_of(self, kv_bytes: float, state_bytes: float = 0.0) -> int:
        """How many requests with so much KVCache each fit at once."""
        return int(self.kv_bytes / self.needed_bytes(kv_bytes, state_bytes)) if kv_bytes > 0 else 0
