"""Arenas of senders on this host: which slot's References point where."""

import logging
import os
from collections.abc import Sequence

from transport.path.shm import open_arena

log = logging.getLogger(__name__)


class Arenas:
    """The arenas of one connection; each is opened once, when first needed."""

    def __init__(self, allowed_dirs: Sequence[str]) -> None:
        self._allowed_dirs = allowed_dirs
        self._paths: dict[int, str] = {}  # of slots
        self._fds: dict[str, int] = {}
        self._unreadable: set[int] = set()  # slots: said once, however many References come

    def bind(self, slot: int, path: str) -> None:
        self._paths[slot] = path

    def leave(self, slot: int) -> None:
        self._paths.pop(slot, None)
        self._unreadable.discard(slot)

    def fd(self, slot: int) -> int | None:
        """The descriptor of a bound slot's arena; None when it has none that may be read."""
        if slot in self._unreadable:
            return None
        path = self._paths.get(slot, "")
        if path not in self._fds:
            try:
                self._fds[path] = open_arena(path, self._allowed_dirs)
            except OSError as exc:
                log.warning("cannot read arena %s of a sender: %s", path, exc)
                self._unreadable.add(slot)
                return None
        return self._fds[path]

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
