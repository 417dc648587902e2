"""What a step of the model does when the copies that it should wait for do not end: it ends without them."""

import threading
from collections.abc import Iterator

import pytest

from engine.errors import PagesInvalid
from engine.vllm.scheduler_side.steps import SaveFailed, StepWritten
from engine.vllm.worker_side.saver import Saver
from transport.control.messages import ControlMessage

FAST_S = 0.05


class Stuck:
    """A copy that ends when it is let."""

    def __init__(self) -> None:
        self.began, self.may_end, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        self.may_end.wait(60.0)
        self.ended.set()


@pytest.fixture
def said() -> list[ControlMessage]:
    return []


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    copy = Stuck()
    yield copy
    copy.may_end.set()


@pytest.fixture
def saver(said: list[ControlMessage], stuck: Stuck) -> Iterator[Saver]:
    saver = Saver(said.append, FAST_S, max_given_up=8)
    yield saver
    stuck.may_end.set()
    saver.close()


def written(job: str) -> StepWritten:
    return StepWritten(job=job, num_tokens=1)


def failed_jobs(said: list[ControlMessage]) -> list[str]:
    return [message.job for message in said if isinstance(message, SaveFailed)]


def test_what_is_copied_in_time_is_announced(said: list[ControlMessage]) -> None:
    saver = Saver(said.append, timeout_s=60.0)
    saver.submit("j", lambda: saver.announce("j", written("j")))
    assert saver.wait() == 0
    saver.close()
    assert said == [written("j")]


def test_a_copy_that_does_not_end_is_given_up_and_never_announced(
    saver: Saver, said: list[ControlMessage], stuck: Stuck
) -> None:
    refused = threading.Event()

    def late() -> None:
        stuck()
        with pytest.raises(PagesInvalid):
            saver.announce("j", written("j"))
        refused.set()

    saver.submit("j", late)
    saver.submit("k", lambda: saver.announce("k", written("k")))  # behind it on the same thread
    assert saver.wait() == 2
    assert failed_jobs(said) == ["j", "k"]
    stuck.may_end.set()
    assert refused.wait(60.0)
    assert [type(message) for message in said] == [SaveFailed, SaveFailed]


def test_steps_do_not_wait_while_an_older_copy_is_stuck(saver: Saver, said: list[ControlMessage], stuck: Stuck) -> None:
    saver.submit("j", stuck)
    stuck.began.wait(60.0)
    assert saver.wait() == 1
    ran = threading.Event()
    saver.submit("next", ran.set)
    assert saver.wait() == 0, "nothing was begun, so nothing is waited for"
    assert failed_jobs(said) == ["j", "next"]
    assert not ran.is_set()


def test_jobs_whose_end_is_never_told_are_not_remembered_for_ever(
    saver: Saver, said: list[ControlMessage], stuck: Stuck
) -> None:
    refused = threading.Event()

    def late() -> None:
        stuck()
        with pytest.raises(PagesInvalid):
            saver.announce("stuck", written("stuck"))
        refused.set()

    saver.submit("stuck", late)
    stuck.began.wait(60.0)
    assert saver.wait() == 1
    for number in range(100):
        saver.submit(f"j{number}", lambda: None)
    assert saver.num_given_up == 8
    stuck.may_end.set()
    assert refused.wait(60.0), "the copy under way is remembered for as long as it runs"
    assert len(failed_jobs(said)) == 101


def test_a_job_that_was_given_up_stays_so_until_it_is_over(said: list[ControlMessage], stuck: Stuck) -> None:
    saver = Saver(said.append, timeout_s=60.0)
    saver.give_up("j", "why")
    ran: list[str] = []
    saver.submit("j", lambda: ran.append("while given up"))
    saver.wait()
    saver.forget("j")
    saver.submit("j", lambda: ran.append("afterwards"))
    saver.wait()
    saver.close()
    assert ran == ["afterwards"]


def test_a_copy_that_raises_gives_up_its_job_alone(said: list[ControlMessage]) -> None:
    saver = Saver(said.append, timeout_s=60.0)

    def broken() -> None:
        raise OSError("no such device")

    saver.submit("j", broken)
    saver.submit("k", lambda: saver.announce("k", written("k")))
    assert saver.wait() == 0
    saver.close()
    assert said == [SaveFailed(job="j", reason="OSError: no such device"), written("k")]
