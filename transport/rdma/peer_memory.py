"""Memory of ours that the NIC of one peer may write into: the buffer of one rail, and nothing else lies in it.

It is a file in memory with pages of its own. So the bytes are copied out of it by the kernel, without the interpreter
lock. And its pages are not used again before the NIC has let go of them, whatever becomes of this object.
"""

import mmap
import os
from typing import Final

from transport.rdma.device import PLACES, RDMA_CHUNK_BYTES, address_of

BUFFER_BYTES: Final = PLACES * RDMA_CHUNK_BYTES


class PeerMemory:
    """The buffer of one rail. Raises OSError where there is no memory."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("prfaas-rail", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, BUFFER_BYTES)  # here, where nothing is locked and it may be refused
            self._map = mmap.mmap(self.fd, BUFFER_BYTES)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = address_of(memoryview(self._map))

    @staticmethod
    def place_of(number: int) -> int:
        """Where the chunk of that number begins."""
        return number % PLACES * RDMA_CHUNK_BYTES

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
