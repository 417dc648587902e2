"""Memory that was registered with a backend which takes addresses, as RDMA libraries do."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class Region:
    """`num_bytes` from `address` on; `view` keeps them from being freed. `token` is the backend's own."""

    address: int
    num_bytes: int
    view: memoryview
    token: Any = None


class Regions:
    """Registered memory by name."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    def add(self, name: str, region: Region) -> None:
        """Raises LocalProtocolError for a name in use."""
        if name in self._regions:
            raise LocalProtocolError(f"segment {name!r} is registered already")
        self._regions[name] = region

    def remove(self, name: str) -> Region | None:
        return self._regions.pop(name, None)

    def names(self) -> list[str]:
        return list(self._regions)

    def address_of(self, view: memoryview) -> int:
        """Where a view lies. Raises LocalProtocolError unless all of it is registered."""
        address = address_of(view)
        for region in self._regions.values():
            if region.address <= address and address + view.nbytes <= region.address + region.num_bytes:
                return address
        raise LocalProtocolError(f"{view.nbytes} local bytes are in no registered memory, which this backend needs")


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def check_open(name: str, *, remote_read: bool, remote_write: bool, backend: str) -> None:
    """Raises ValueError where more is asked for than a backend without access control can keep."""
    if not (remote_read and remote_write):
        raise ValueError(
            f"segment {name!r}: {backend} cannot forbid anything; every peer that reaches it may read and write registered"
            " memory, so register with remote_read=True and remote_write=True, or use BatchEngine"
        )
