"""Describes a range's values: enough for a codec to split them, and nothing about tokens.

    range    | Run: num_bytes of bfloat16, vectors of 128 | Run: ... |

The values of a vector share one scale when they are quantised: one head of one token. bfloat16 has no numpy type; it is
the upper half of a float32.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

ITEM_BYTES: Final = {"": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_QUANTISABLE: Final = ("float16", "bfloat16", "float32")
MAX_VECTOR: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class Run:
    """`num_bytes` of values of `dtype` ("" = just bytes), `vector` of them to a scale (0 = never quantised)."""

    num_bytes: int
    dtype: str = ""
    vector: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: known are {', '.join(map(repr, ITEM_BYTES))}")
        if not 0 <= self.vector <= MAX_VECTOR or self.num_bytes < 0:
            raise ValueError(f"{self}: vectors of 0 to {MAX_VECTOR} elements")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector; 0 where values of this type are not quantised."""
        return self.vector * self.item_bytes if self.dtype in _QUANTISABLE else 0


def to_floats(raw: Bytes, dtype: str) -> Floats:
    """The values in `raw` (shape [bytes]) as float32, exactly."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.dtype(dtype)).astype(np.float32)


def from_floats(values: Floats, dtype: str) -> Bytes:
    """float32 values as bytes of `dtype`, rounded to the nearest, ties to even."""
    if dtype == "bfloat16":
        bits = values.reshape(-1).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    return values.reshape(-1).astype(np.dtype(dtype)).view(np.uint8)


def shuffle(raw: Bytes, item_bytes: int) -> Bytes:
    """First bytes of all values, then second bytes, ...: exponents resemble each other, mantissas resemble nothing."""
    whole = raw.size // item_bytes * item_bytes
    if item_bytes == 1 or not whole:
        return raw
    planes = np.empty(raw.size, np.uint8)
    planes[:whole].reshape(item_bytes, -1)[:] = raw[:whole].reshape(-1, item_bytes).T
    planes[whole:] = raw[whole:]
    return planes


def unshuffle(planes: Bytes, item_bytes: int, into: Bytes) -> None:
    """Inverse of `shuffle`, into memory of the same size."""
    whole = planes.size // item_bytes * item_bytes
    if item_bytes == 1 or not whole:
        into[:] = planes
        return
    into[:whole].reshape(-1, item_bytes)[:] = planes[:whole].reshape(item_bytes, -1).T
    into[whole:] = planes[whole:]
