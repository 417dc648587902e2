"""A watch holds no more than its bound of what was not looked at yet."""

import itertools
from collections.abc import Iterator

import pytest

from membership.errors import EtcdFailed
from membership.etcd.watching import MAX_WAITING_BYTES, EtcdWatch
from tests.membership.etcd.servers import until
from transport.control.proto.etcd_pb2 import EtcdKeyValue, WatchEvent, WatchRequest, WatchResponse

FITTING = 3  # answers of a little more than a quarter of the bound
ANSWERS = 10


def answer(revision: int, num_bytes: int) -> WatchResponse:
    found = WatchResponse(events=[WatchEvent(kv=EtcdKeyValue(value=bytes(num_bytes)))])
    found.header.revision = revision
    return found


class Stream:
    """What gRPC gives for a call: it is read by the watch's thread."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.read = 0

    def __call__(self, requests: Iterator[WatchRequest]) -> "Stream":
        return self

    def __iter__(self) -> Iterator[WatchResponse]:
        for number in range(ANSWERS):
            self.read += 1
            yield answer(number, self._num_bytes)

    def cancel(self) -> None:
        return


@pytest.mark.parametrize(("num_bytes", "fitting"), [(MAX_WAITING_BYTES // 4, FITTING), (2 * MAX_WAITING_BYTES, 1)])
def test_answers_beyond_the_bound_wait_in_the_connection(num_bytes: int, fitting: int) -> None:
    stream = Stream(num_bytes)
    watch = EtcdWatch(stream, b"a", b"b", 1)
    until(lambda: stream.read == fitting + 1)
    first = [each.header.revision for each in itertools.islice(watch.take(), fitting)]
    assert first == list(range(fitting))
    seen = list(first)

    def is_over() -> bool:
        try:
            seen.extend(each.header.revision for each in watch.take())
        except EtcdFailed:
            return True
        return False

    until(is_over)
    assert seen == list(range(ANSWERS))
    watch.close()


def test_a_watch_that_is_closed_frees_its_thread() -> None:
    stream = Stream(2 * MAX_WAITING_BYTES)
    watch = EtcdWatch(stream, b"a", b"b", 1)
    until(lambda: stream.read == 2)
    watch.close()
    until(lambda: stream.read == ANSWERS)


def test_a_watch_that_does_not_begin_is_said_to_be_late() -> None:
    class Silent(Stream):
        def __iter__(self) -> Iterator[WatchResponse]:
            until(lambda: watch_is_late)
            return iter(())

    watch_is_late: list[bool] = []
    watch = EtcdWatch(Silent(1), b"a", b"b", 1)
    with pytest.raises(EtcdFailed, match="does not begin"):
        watch.first(0.0)
    watch_is_late.append(True)
    watch.close()
