"""The last requests that ended, for whoever wants to look: a bounded ring, read by sequence number."""

from collections import deque
from collections.abc import Iterator

from gateway.request import Request, RequestRecord, record_of


class Records:
    """Keeps `limit` records. Sequence numbers start at 1 and never repeat while the gateway runs."""

    def __init__(self, limit: int) -> None:
        self._ring: deque[RequestRecord] = deque(maxlen=limit)
        self._last_seq = 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, request: Request, status: int, error: str = "") -> RequestRecord:
        self._last_seq += 1
        record = record_of(request, self._last_seq, status, error)
        self._ring.append(record)
        return record

    def since(self, seq: int) -> Iterator[RequestRecord]:
        """Records after `seq`, oldest first."""
        return (record for record in self._ring if record.seq > seq)
