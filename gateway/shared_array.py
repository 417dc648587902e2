"""Numbers that processes share: a file that each of them has mapped."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CELL_BYTES: Final = 8


class SharedArray:
    """`cells` are the file's numbers, of 8 bytes each. Without a path they belong to this process alone."""

    def __init__(self, path: Path | None, kind: type[np.int64] | type[np.float64], *, num_cells: int = 0) -> None:
        """Maps a file that `create` has made; without one, `num_cells` zeros. Raises OSError."""
        self._fd = -1 if path is None else os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._fd, CELL_BYTES * num_cells if path is None else 0)
        self.cells: NDArray[Any] = np.frombuffer(self._map, kind)

    @staticmethod
    def create(path: Path, num_cells: int, head: bytes = b"") -> None:
        """A file of zeros that begins with `head`. Raises OSError."""
        with path.open("xb") as file:
            file.write(head)
            file.truncate(CELL_BYTES * num_cells)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process is inside. The lock ends with its process, however that ends."""
        if self._fd < 0:
            yield
            return
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Lets go of the file. Its owner has dropped all views of `cells` before."""
        del self.cells
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
