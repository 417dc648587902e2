import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.coding.elements import ITEM_BYTES, Run, from_floats, shuffle, to_floats, unshuffle


@given(st.binary(max_size=500), st.sampled_from(sorted(set(ITEM_BYTES.values()))))
def test_shuffled_bytes_come_back(data: bytes, item_bytes: int) -> None:
    raw, back = np.frombuffer(data, np.uint8), np.empty(len(data), np.uint8)
    unshuffle(shuffle(raw, item_bytes), item_bytes, back)
    assert back.tobytes() == data


def test_shuffling_puts_first_bytes_first() -> None:
    assert bytes(shuffle(np.frombuffer(b"a1b2c3d", np.uint8), 2)) == b"abc123d"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_values_are_exact_as_floats(dtype: str) -> None:
    raw = np.random.default_rng(1).integers(0, 256, 4096).astype(np.uint8)
    values = to_floats(raw, dtype)
    finite = np.isfinite(values)
    again = to_floats(from_floats(values, dtype), dtype)
    assert (again[finite] == values[finite]).all()


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    ones = np.array([1.0, 1.0 + 2**-8, 1.0 + 2**-8 + 2**-20, 1.0 + 3 * 2**-8], np.float32)
    assert to_floats(from_floats(ones, "bfloat16"), "bfloat16").tolist() == [1.0, 1.0, 1.0 + 2**-7, 1.0 + 2**-6]


def test_runs_say_what_they_cannot_be() -> None:
    with pytest.raises(ValueError, match="int4"):
        Run(10, "int4")
    with pytest.raises(ValueError, match="vectors"):
        Run(10, "float16", 1 << 20)
    assert Run(10, "float64", 8).vector_bytes == 0  # compressed, never quantised
    assert Run(10, "bfloat16", 8).vector_bytes == 16
