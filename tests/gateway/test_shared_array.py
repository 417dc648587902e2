"""Numbers of several processes in one file."""

from pathlib import Path

import numpy as np
import pytest

from gateway.shared_array import SharedArray


def test_all_who_map_a_file_see_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    SharedArray.create(path, 3, np.array([7], np.int64).tobytes())
    one, other = SharedArray(path, np.int64), SharedArray(path, np.int64)
    with one.locked():
        one.cells[2] = 5
    assert other.cells.tolist() == [7, 0, 5]
    one.close()
    assert other.cells.tolist() == [7, 0, 5]
    other.close()
    with pytest.raises(FileExistsError):
        SharedArray.create(path, 3)


def test_without_a_file_the_numbers_are_ones_own() -> None:
    one, other = (SharedArray(None, np.float64, num_cells=2) for _ in range(2))
    with one.locked():
        one.cells[:] = 1.5
    assert (one.cells.tolist(), other.cells.tolist()) == ([1.5, 1.5], [0.0, 0.0])
    one.close()
    other.close()
