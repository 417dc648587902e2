"""The last requests that ended: a bounded ring, read by sequence number."""

from collections import deque
from collections.abc import Callable, Iterator

from gateway.request.request import Request, RequestRecord, record_of


class RecordRing:
    """Keeps `limit` records. Sequence numbers start at 1 and never repeat while the gateway runs, in whichever process."""

    def __init__(self, limit: int, next_seq: Callable[[], int]) -> None:
        self.limit = limit
        self._ring: deque[RequestRecord] = deque(maxlen=limit)
        self._next_seq = next_seq

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, request: Request, status: int, error: str = "") -> RequestRecord:
        record = record_of(request, self._next_seq(), status, error)
        self._ring.append(record)
        return record

    def since(self, seq: int) -> Iterator[RequestRecord]:
        """Records after `seq`, oldest first."""
        return (record for record in self._ring if record.seq > seq)
