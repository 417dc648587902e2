"""Eight bits instead of 16 or 32, with one float32 scale per vector: a head of a token.

    quantised    | scales: one float32 per vector | codes: one byte per value |

Error per value x of a vector whose largest magnitude is m, besides the rounding to the original type:

    int8   scale m / 127, code round(x / scale)                  |error| <= m / 254
    fp8    scale m / 448, code the nearest e4m3 (4 bit exponent) |error| <= max(|x| / 16, m / 458,752)

int8 is more exact where the values of a head have one size, fp8 where a few are outliers. e4m3 is the variant of the
OCP 8-bit floating point specification without infinities: 448 is its largest value, 2^-6 its smallest normal one.
"""

from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from transport.coding.elements import Bytes, Floats, from_floats, to_floats

SCALE_BYTES: Final = 4
INT8_MAX: Final = 127.0
FP8_MAX: Final = 448.0
SMALLEST: Final = 1e-30  # a vector below it counts as zeros: its scale would be no normal float32
LARGEST: Final = 1e37  # beyond it the way back could overflow
_TILE_VALUES: Final = 1 << 16  # float32 copies of this many stay in the cache of a core


class QuantisedType(StrEnum):
    INT8 = "int8"
    FP8 = "fp8"


def quantise(raw: Bytes, dtype: str, vector: int, kind: QuantisedType) -> Bytes | None:
    """Scales and codes of whole vectors. None if a value has no scale: it is not finite, or too large."""
    item_bytes = 2 if dtype != "float32" else 4
    vectors = raw.size // (item_bytes * vector)
    out = np.empty(vectors * (SCALE_BYTES + vector), np.uint8)
    scales = out[: vectors * SCALE_BYTES].view(np.float32)
    codes = out[vectors * SCALE_BYTES :].reshape(vectors, vector)
    step = max(1, _TILE_VALUES // vector)
    for first in range(0, vectors, step):
        last = min(first + step, vectors)
        part = raw[first * vector * item_bytes : last * vector * item_bytes]
        values = to_floats(part, dtype).reshape(last - first, vector)
        magnitude = np.abs(values)
        largest = magnitude.max(axis=1)
        if not largest.max() < LARGEST:  # also when it is not a number
            return None
        top = INT8_MAX if kind is QuantisedType.INT8 else FP8_MAX
        scale = np.where(largest < SMALLEST, 0.0, largest / top).astype(np.float32)
        inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
        values *= inverse[:, None]
        scales[first:last] = scale
        if kind is QuantisedType.INT8:
            codes[first:last] = np.rint(values, out=values).astype(np.int8).view(np.uint8)
        else:
            codes[first:last] = _to_e4m3(values)
    return out


def dequantise(quantised: Bytes, dtype: str, vector: int, kind: QuantisedType, into: Bytes) -> None:
    """Inverse of `quantise`, up to the error above. Raises ValueError for input that `quantise` cannot have made."""
    vectors, rest = divmod(quantised.size, SCALE_BYTES + vector)
    item_bytes = 2 if dtype != "float32" else 4
    if rest or vectors * vector * item_bytes != into.size:
        raise ValueError(f"{quantised.size} quantised bytes for {into.size} plain ones in vectors of {vector}")
    scales = quantised[: vectors * SCALE_BYTES].view(np.float32)
    codes = quantised[vectors * SCALE_BYTES :].reshape(vectors, vector)
    if not ((scales >= 0) & (scales < LARGEST)).all():
        raise ValueError("an invalid scale")
    step = max(1, _TILE_VALUES // vector)
    for first in range(0, vectors, step):
        last = min(first + step, vectors)
        values = _from_int8(codes[first:last]) if kind is QuantisedType.INT8 else E4M3[codes[first:last]]
        values = values * scales[first:last, None]
        into[first * vector * item_bytes : last * vector * item_bytes] = from_floats(values, dtype)
    if kind is QuantisedType.FP8 and ((codes & 0x7F) == 0x7F).any():
        raise ValueError("a code that is not a number")


def _from_int8(codes: Bytes) -> Floats:
    return codes.view(np.int8).astype(np.float32)


def _to_e4m3(values: Floats) -> Bytes:
    """The nearest e4m3 codes, ties to even, of values within ±448."""
    magnitude = np.minimum(np.abs(values), np.float32(FP8_MAX))
    bits = magnitude.view(np.uint32)
    # Three of 23 bits of the mantissa stay; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20).astype(np.int32) - (120 << 3)
    # Below the smallest normal value codes count steps of 2^-9; eight of them are the code of that value.
    subnormal = np.rint(magnitude * np.float32(512)).astype(np.int32)
    codes = np.where(magnitude < 2.0**-6, subnormal, normal).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 7
    return codes


def _e4m3_values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)


E4M3: Final = _e4m3_values()
