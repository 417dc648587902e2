"""Which of a gateway's processes does what one of them is to do for all, generations that replace each other included."""

import contextlib
import fcntl
import os
from pathlib import Path


class Duty:
    """A lock on a file, for as long as this process lives. Without a path there are no other processes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd: int | None = None
        self._is_ours = path is None

    def __call__(self) -> bool:
        """Whether it is this process's: the first one that asks has it until it ends."""
        if not self._is_ours:
            with contextlib.suppress(OSError):  # another one has it, or the folder is gone
                self._take()
        return self._is_ours

    def _take(self) -> None:
        assert self._path is not None
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._is_ours = True

    def give_up(self) -> None:
        """Another process may have it; this one is about to end, and has done all that there was to do."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd, self._is_ours = None, False
