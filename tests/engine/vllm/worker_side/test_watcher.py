"""What is to be done when a device has got somewhere is done in order, and without waiting where that can be."""

import threading

import pytest

from engine.vllm.worker_side.device import OVER
from engine.vllm.worker_side.watcher import MarkWatcher


class Gate:
    """A mark that is over when it is opened, or that the device cannot get to."""

    def __init__(self, error: Exception | None = None) -> None:
        self._open = threading.Event()
        self._error = error

    def open(self) -> None:
        self._open.set()

    def is_over(self) -> bool:
        return self._open.is_set()

    def wait(self) -> None:
        assert self._open.wait(60.0)
        if self._error is not None:
            raise self._error


@pytest.fixture
def watcher():
    made = MarkWatcher()
    yield made
    made.close()


def refuse(error: Exception) -> None:
    raise AssertionError(error)


def test_what_is_over_is_done_at_once_by_the_thread_that_asks(watcher):
    done: list[int] = []
    watcher.when_over(OVER, lambda: done.append(threading.get_ident()), refuse)
    assert done == [threading.get_ident()]


def test_what_comes_behind_a_mark_waits_for_it_as_well(watcher):
    done: list[int] = []
    first, second, last = Gate(), Gate(), threading.Event()
    second.open()
    watcher.when_over(first, lambda: done.append(1), refuse)
    watcher.when_over(second, lambda: done.append(2), refuse)
    watcher.when_over(OVER, lambda: (done.append(3), last.set()), refuse)
    assert done == []
    first.open()
    assert last.wait(60.0)
    assert done == [1, 2, 3]


def test_a_device_that_fails_is_told_and_the_rest_goes_on(watcher):
    failed: list[str] = []
    broken, last = Gate(RuntimeError("no such address")), threading.Event()
    watcher.when_over(broken, last.clear, lambda error: failed.append(str(error)))
    watcher.when_over(OVER, last.set, refuse)
    broken.open()
    assert last.wait(60.0)
    assert failed == ["no such address"]


def test_an_error_in_what_is_done_is_told_and_ends_nothing_else(watcher):
    gate, errors, done = Gate(), [], threading.Event()

    def fail() -> None:
        raise OSError("the agent is gone")

    watcher.when_over(gate, fail, errors.append)
    watcher.when_over(gate, done.set, refuse)
    gate.open()
    assert done.wait(60.0)
    assert [str(error) for error in errors] == ["the agent is gone"]
