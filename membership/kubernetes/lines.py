"""Cuts what a watch says into lines, of at most so many bytes."""

from collections.abc import Iterator

from membership.errors import KubernetesFailed


class WatchLines:
    """Takes bytes in whatever parts they come. `told_by` names the watch."""

    def __init__(self, limit_bytes: int, told_by: str) -> None:
        self._limit_bytes = limit_bytes
        self._told_by = told_by
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The lines that end in this part; empty ones are left out. Raises KubernetesFailed."""
        *ends, rest = part.split(b"\n")
        for end in ends:
            self._add(end)
            line, self._rest = bytes(self._rest), bytearray()
            if line.strip():
                yield line
        self._add(rest)

    def _add(self, part: bytes) -> None:
        if len(self._rest) + len(part) > self._limit_bytes:
            raise KubernetesFailed("too_long", f"{self._told_by}: an object has more than {self._limit_bytes} bytes")
        self._rest += part
