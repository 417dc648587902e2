"""What ends is started again, and said; what is needed and never stays up ends everything."""

import asyncio
import errno
from collections.abc import Sequence

import pytest

from prfaas.errors import StartError, StartKilled, StartRefused
from prfaas.system.upkeep import first_start, keep_up


class Scripted:
    """A process that ends as it was told to."""

    def __init__(self, status: int | None) -> None:
        self.name = "n0"
        self._status = status

    async def wait(self) -> int:
        if self._status is None:
            await asyncio.get_running_loop().create_future()
        assert self._status is not None
        return self._status

    async def stop(self, timeout_s: float) -> int | None:
        return self._status


def told_of(
    starts: Sequence[int | Exception | None], max_restarts: int, *, first: int = 1, is_needed: bool = True
) -> list[str]:
    """What is said of a process that ends with status `first`, and whose next starts come to `starts`; None: it stays."""
    told: list[str] = []
    pauses: list[float] = []
    left = list(starts)

    async def again() -> Scripted:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return Scripted(outcome)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def scenario() -> None:
        async def till_all_were_started() -> None:
            while left:  # noqa: ASYNC110 one turn of the loop each
                await asyncio.sleep(0)
            await asyncio.sleep(0)

        keeper = asyncio.create_task(
            keep_up(
                Scripted(first),
                again,
                told.append,
                lambda: 0.0,
                pause=pause,
                max_restarts=max_restarts,
                is_needed=is_needed,
            )
        )
        await asyncio.wait([keeper, asyncio.create_task(till_all_were_started())], return_when="FIRST_COMPLETED")
        if not keeper.done():
            keeper.cancel()
        else:
            keeper.result()

    asyncio.run(scenario())
    assert pauses == sorted(pauses)
    return told


def test_it_is_started_again_and_said() -> None:
    assert told_of([None], 5) == ["n0 ended with status 1: it is started again in 0.5 s", "n0 is back"]


def test_a_start_that_fails_is_tried_again_later() -> None:
    assert told_of([StartError("no room"), None], 5) == [
        "n0 ended with status 1: it is started again in 0.5 s",
        "n0 did not come up: no room: it is started again in 1 s",
        "n0 is back",
    ]


def test_a_disk_that_is_full_for_a_moment_does_not_end_everything() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert told_of([full, None], 5)[1:] == [f"n0 did not come up: {full}: it is started again in 1 s", "n0 is back"]


def test_what_refuses_to_start_was_up_before_and_may_be_again() -> None:
    assert told_of([StartRefused("no such directory"), None], 5)[-2:] == [
        "n0 did not come up: no such directory: it is started again in 1 s",
        "n0 is back",
    ]


def test_what_is_not_needed_is_tried_rarely_instead_of_given_up() -> None:
    assert told_of([1, 1, StartError("no room"), None], 2, is_needed=False)[-3:] == [
        "n0 ended with status 1: it is started again in 30 s",
        "n0 did not come up: no room: it is started again in 30 s",
        "n0 is back",
    ]


def test_what_never_stays_up_is_given_up_where_nothing_works_without_it() -> None:
    with pytest.raises(StartError, match="n0 failed 3 times and is given up; last: n0 ended with status 1"):
        told_of([1, 1, 1], 2)
    with pytest.raises(StartError, match="last: n0 did not come up: no room"):
        told_of([StartError("no room")], 1)


def test_what_is_killed_from_outside_is_never_given_up() -> None:
    """A gateway that was killed six times within a minute ended every node with it."""
    killed = StartKilled("n0 ended with status -9 before it said 'ready '; end of n0.log:\nlong")
    told = told_of([-9, killed, -15, killed, -9, 137, killed, None], 1, first=-9)
    assert told[0] == "n0 ended with status -9: it is started again in 0.5 s"
    assert told[3] == "n0 did not come up: n0 ended with status -9 before it said 'ready ': it is started again in 2 s"
    assert told[-2:] == [f"n0 did not come up: {str(killed).split(';')[0]}: it is started again in 8 s", "n0 is back"]


def first_told_of(starts: Sequence[Exception | None], max_restarts: int = 2) -> list[str]:
    """What is said until a process, whose first starts come to `starts`, has come up."""
    told: list[str] = []
    left = list(starts)

    async def start() -> Scripted:
        outcome = left.pop(0)
        if outcome is not None:
            raise outcome
        return Scripted(None)

    async def pause(seconds: float) -> None:
        assert seconds > 0

    asyncio.run(first_start("n0", start, told.append, lambda: 0.0, pause=pause, max_restarts=max_restarts))
    assert not left
    return told


def test_a_first_start_that_fails_of_what_may_pass_is_tried_again() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert first_told_of([StartError("no room; end of n0.log:\nlong"), full, None]) == [
        "n0 did not come up: no room: it is started again in 0.5 s",
        f"n0 did not come up: {full}: it is started again in 1 s",
    ]


def test_a_first_start_that_is_killed_says_nothing_of_the_next_one() -> None:
    killed = StartKilled("n0 ended with status -9 before it said 'node ready'")
    assert len(first_told_of([killed] * 20 + [None])) == 20


def test_a_first_start_that_is_refused_ends_at_once() -> None:
    with pytest.raises(StartRefused, match="no such directory"):
        first_told_of([StartKilled("n0"), StartRefused("no such directory"), None])


def test_a_first_start_that_fails_by_itself_again_and_again_is_given_up_with_its_reason() -> None:
    with pytest.raises(StartError, match="the third time"):
        first_told_of([StartError("once"), StartError("twice"), StartError("the third time"), None])
