"""The error bounds are those that the module's docstring states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.properties import examples
from transport.coding.elements import from_floats, to_floats
from transport.coding.quantise import E4M3, FP8_MAX, SCALE_BYTES, SMALLEST, QuantisedType, dequantise, quantise

DTYPES = ["float16", "bfloat16", "float32"]
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23}


def there_and_back(values: np.ndarray, dtype: str, kind: QuantisedType) -> tuple[np.ndarray, np.ndarray]:
    """The values as `dtype` holds them, and what is left of them."""
    raw = from_floats(values.astype(np.float32), dtype).copy()
    vector = values.shape[1]
    quantised = quantise(raw, dtype, vector, kind)
    assert quantised is not None
    assert quantised.size == values.shape[0] * (SCALE_BYTES + vector)
    back = np.empty_like(raw)
    dequantise(quantised, dtype, vector, kind, back)
    shape = values.shape
    return to_floats(raw, dtype).reshape(shape), to_floats(back, dtype).reshape(shape)


def bound(before: np.ndarray, dtype: str, kind: QuantisedType) -> np.ndarray:
    largest = np.abs(before).max(axis=1, keepdims=True).astype(np.float64)
    error = largest / 254 if kind is QuantisedType.INT8 else np.maximum(np.abs(before) / 16.0, largest / 458_752)
    # What comes out is rounded to its type; float16 has steps of 2^-24 below its smallest normal value.
    subnormal = 2.0**-25 if dtype == "float16" else 0.0
    return (error + (np.abs(before) + error) * ROUNDING[dtype] + subnormal) * (1 + 1e-5) + SMALLEST


@settings(max_examples=examples(60), deadline=None)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.integers(1, 40)), elements=st.floats(-6e4, 6e4, width=32)),
    st.sampled_from(DTYPES),
    st.sampled_from(list(QuantisedType)),
)
def test_no_value_is_off_by_more_than_documented(values: np.ndarray, dtype: str, kind: QuantisedType) -> None:
    before, after = there_and_back(values, dtype, kind)
    assert (np.abs(after.astype(np.float64) - before) <= bound(before, dtype, kind)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "rms"), [(QuantisedType.INT8, 0.008), (QuantisedType.FP8, 0.03)])
def test_the_error_of_normal_values(dtype: str, kind: QuantisedType, rms: float) -> None:
    values = np.random.default_rng(1).standard_normal((3000, 128))  # several tiles
    before, after = there_and_back(values, dtype, kind)
    assert np.sqrt(np.mean((after - before) ** 2)) < rms


def test_zeros_stay_zeros() -> None:
    for kind in QuantisedType:
        _, after = there_and_back(np.zeros((4, 16)), "bfloat16", kind)
        assert not after.any()


def test_a_head_has_a_scale_of_its_own() -> None:
    values = np.stack([np.full(64, 1e-4), np.full(64, 1e4)])
    for kind in QuantisedType:
        before, after = there_and_back(values, "float32", kind)
        assert np.allclose(after, before, rtol=1e-2)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 3e38])
def test_what_no_scale_carries_is_not_quantised(odd: float) -> None:
    values = np.ones((3, 8), np.float32)
    values[1, 2] = odd
    for kind in QuantisedType:
        assert quantise(from_floats(values, "float32"), "float32", 8, kind) is None


def test_every_e4m3_code_is_the_nearest_to_its_own_value() -> None:
    numbers = np.array([code for code in range(256) if code & 0x7F not in (0x7F, 0)], np.uint8)
    values = np.concatenate([E4M3[numbers], [FP8_MAX]]).astype(np.float32)[None, :]  # scale 1
    quantised = quantise(from_floats(values, "float32"), "float32", values.shape[1], QuantisedType.FP8)
    assert quantised is not None
    assert (quantised[SCALE_BYTES:-1] == numbers).all()


def test_between_two_e4m3_values_the_even_one_wins() -> None:
    # 16 to 18 are neighbours with codes 0x58 and 0x59; so are 2^-9 and 2^-8, below the smallest normal value
    values = np.array([[17.0, 17.1, 1.5 * 2**-9, 1.6 * 2**-9, FP8_MAX]], np.float32)
    quantised = quantise(from_floats(values, "float32"), "float32", 5, QuantisedType.FP8)
    assert quantised is not None
    assert quantised[SCALE_BYTES:].tolist() == [0x58, 0x59, 2, 2, 0x7E]


def test_what_nobody_quantised_is_refused() -> None:
    into = np.empty(2 * 8 * 2, np.uint8)
    good = quantise(from_floats(np.ones((2, 8), np.float32), "bfloat16"), "bfloat16", 8, QuantisedType.FP8)
    assert good is not None
    with pytest.raises(ValueError, match="vectors of 8"):
        dequantise(good[:-1], "bfloat16", 8, QuantisedType.FP8, into)
    with pytest.raises(ValueError, match="vectors of 8"):
        dequantise(good, "bfloat16", 8, QuantisedType.FP8, into[:-2])
    bad_scale, bad_code = good.copy(), good.copy()
    bad_scale[:4].view(np.float32)[0] = np.nan
    bad_code[-1] = 0xFF
    with pytest.raises(ValueError, match="scale"):
        dequantise(bad_scale, "bfloat16", 8, QuantisedType.FP8, into)
    with pytest.raises(ValueError, match="number"):
        dequantise(bad_code, "bfloat16", 8, QuantisedType.FP8, into)
