"""A watch of etcd: a thread reads what comes; it is looked at without waiting."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from membership.errors import EtcdFailed
from transport.control.proto.etcd_pb2 import WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse

MAX_WAITING: Final = 64  # answers that were not looked at yet; more wait in the connection
LOOK_S: Final = 0.5  # between two looks whether a watch is closed that is not looked at


class EtcdWatch:
    """What changes below a key. `call` begins a stream of these requests."""

    def __init__(self, call: Callable[[Iterator[WatchRequest]], Any], key: bytes, end: bytes, revision: int) -> None:
        create = WatchCreateRequest(
            key=key, range_end=end, start_revision=revision, progress_notify=True, fragment=True
        )
        self._requests: queue.SimpleQueue[WatchRequest | None] = queue.SimpleQueue()
        self._requests.put(WatchRequest(create_request=create))
        self._answers: queue.Queue[WatchResponse | str] = queue.Queue(MAX_WAITING)
        self._is_closed = threading.Event()
        self._call = call(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="etcd-watch", daemon=True).start()

    def first(self, timeout_s: float) -> WatchResponse:
        """What comes first. Raises EtcdFailed."""
        try:
            answer = self._answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise EtcdFailed("late", "etcd does not begin the watch") from None
        return _good(answer)

    def take(self) -> Iterator[WatchResponse]:
        """What has come. Raises EtcdFailed where the watch has ended."""
        for _ in range(MAX_WAITING):
            try:
                answer = self._answers.get_nowait()
            except queue.Empty:
                return
            yield _good(answer)

    def ask_progress(self) -> None:
        """Has etcd say something, whether anything changes or not."""
        self._requests.put(WatchRequest(progress_request=WatchProgressRequest()))

    def close(self) -> None:
        self._is_closed.set()
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
        while not self._is_closed.is_set():
            with contextlib.suppress(queue.Full):
                self._answers.put(answer, timeout=LOOK_S)
                return


def _good(answer: WatchResponse | str) -> WatchResponse:
    if isinstance(answer, str):
        raise EtcdFailed("unreachable", answer)
    return answer
