"""A watch of etcd: a thread reads what comes; it is looked at without waiting."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from membership.errors import EtcdFailed
from transport.control.proto.etcd_pb2 import WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse

MAX_WAITING_BYTES: Final = 4 << 20  # of answers that were not looked at yet; more wait in the connection


class EtcdWatch:
    """What changes below a key. `call` begins a stream of these requests."""

    def __init__(self, call: Callable[[Iterator[WatchRequest]], Any], key: bytes, end: bytes, revision: int) -> None:
        create = WatchCreateRequest(
            key=key, range_end=end, start_revision=revision, progress_notify=True, fragment=True
        )
        self._requests: queue.SimpleQueue[WatchRequest | None] = queue.SimpleQueue()
        self._requests.put(WatchRequest(create_request=create))
        self._answers: deque[tuple[WatchResponse | str, int]] = deque()  # and their bytes
        self._waiting_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()  # of the three above
        self._call = call(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="etcd-watch", daemon=True).start()

    def first(self, timeout_s: float) -> WatchResponse:
        """What comes first. Raises EtcdFailed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._answers, timeout=max(0.0, timeout_s)):
                raise EtcdFailed("late", "etcd does not begin the watch")
            return _good(self._next())

    def take(self) -> Iterator[WatchResponse]:
        """What has come. Raises EtcdFailed where the watch has ended."""
        for _ in range(len(self._answers)):
            with self._changed:
                answer = self._next()
            yield _good(answer)

    def ask_progress(self) -> None:
        """Has etcd say something, whether anything changes or not."""
        self._requests.put(WatchRequest(progress_request=WatchProgressRequest()))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._requests.put(None)
        self._call.cancel()

    def _read(self) -> None:
        end = "etcd has ended the watch"
        try:
            for answer in self._call:
                self._put(answer)
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.Call) else ""
            end = f"{end}: {details}" if details else end
        finally:
            self._requests.put(None)
            self._put(end)

    def _put(self, answer: WatchResponse | str) -> None:
        """An answer that is too long waits until it is alone."""
        size = len(answer) if isinstance(answer, str) else answer.ByteSize()

        def has_room() -> bool:
            return self._is_closed or not self._answers or self._waiting_bytes + size <= MAX_WAITING_BYTES

        with self._changed:
            self._changed.wait_for(has_room)
            if not self._is_closed:
                self._answers.append((answer, size))
                self._waiting_bytes += size
                self._changed.notify_all()

    def _next(self) -> WatchResponse | str:
        answer, size = self._answers.popleft()
        self._waiting_bytes -= size
        self._changed.notify_all()
        return answer


def _good(answer: WatchResponse | str) -> WatchResponse:
    if isinstance(answer, str):
        raise EtcdFailed("unreachable", answer)
    return answer
