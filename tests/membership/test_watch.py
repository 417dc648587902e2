"""What a gateway hears of registries: what has changed, what is lost, and what is back."""

import asyncio
import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from membership.errors import SourceFailed
from membership.member import Member
from membership.registration import FolderEntry, registered
from membership.view import RegistryReading, View
from membership.watch import MembershipWatch
from tests.gateway.worlds import until

A = Member(id="a", agent="127.0.0.1:7001")


class Scripted:
    """Says one thing after the other, and the last one for ever."""

    name = "file"

    def __init__(self, *answers: RegistryReading | SourceFailed | Callable[[], object] | None) -> None:
        self.answers = list(answers)

    def look(self) -> RegistryReading | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SourceFailed):
            raise answer
        if callable(answer):
            answer()
            return None
        return answer

    def close(self) -> None:
        pass


def heard(
    source: Scripted, number: int, late_s: float = 60.0, on_failure: Callable[[], object] = lambda: None
) -> tuple[list[View], list[str]]:
    """The first views that are told of, and the failures up to then."""
    views, failures = list[View](), list[str]()

    async def main() -> None:
        enough = asyncio.Event()

        def on_view(name: str, view: View) -> None:
            views.append(view)
            if len(views) == number:
                enough.set()

        def failed(name: str, reason: str) -> None:
            failures.append(reason)
            on_failure()

        now = asyncio.get_running_loop().time
        watch = MembershipWatch([source], now, on_view, failed, poll_s=0.0, late_s=late_s)
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(60.0):
            await enough.wait()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    return views, failures


def test_a_registry_that_fails_and_is_back_as_it_was_is_fresh_again() -> None:
    lost = SourceFailed("missing", "it is not there")
    views, failures = heard(Scripted(RegistryReading(members=[A]), None, lost, lost, None), 3)
    assert [view.state for view in views] == ["fresh", "frozen", "fresh"]
    assert all(view.members == {"a": A} for view in views)
    assert failures == ["missing"]


def test_an_empty_list_is_not_believed_however_often_it_is_said() -> None:
    views, _ = heard(
        Scripted(RegistryReading(members=[A]), RegistryReading(), None, None, RegistryReading(members=[A])), 3
    )
    assert [(view.state, [*view.members]) for view in views] == [("fresh", ["a"]), ("frozen", ["a"]), ("fresh", ["a"])]


def test_a_registry_that_hangs_is_lost_until_it_answers() -> None:
    hung = threading.Event()
    views, failures = heard(Scripted(RegistryReading(members=[A]), hung.wait, None), 3, late_s=1.0, on_failure=hung.set)
    assert [view.state for view in views] == ["fresh", "frozen", "fresh"]
    assert failures == ["late"]


def test_a_watch_that_failed_unforeseen_goes_on_and_only_one_that_is_cancelled_closes_its_registries() -> None:
    class Closable(Scripted):
        is_closed = False

        def look(self) -> RegistryReading | None:
            assert not self.is_closed
            return super().look()

        def close(self) -> None:
            self.is_closed = True

    source, views = Closable(lambda: [][0], RegistryReading(members=[A])), list[View]()

    async def main() -> None:
        heard = asyncio.Event()

        def on_view(name: str, view: View) -> None:
            views.append(view)
            heard.set()

        watch = MembershipWatch([source], asyncio.get_running_loop().time, on_view)
        with pytest.raises(ExceptionGroup):
            await watch.run()
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(60.0):
            await heard.wait()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    assert [view.state for view in views] == ["fresh"]
    assert source.is_closed


def test_a_node_is_registered_while_it_runs_and_comes_back_when_its_file_was_lost(tmp_path: Path) -> None:
    entry = FolderEntry(tmp_path / "fleet", A)

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60.0):
            while not holds():  # noqa: ASYNC110 a file says nothing by itself
                await asyncio.sleep(0.01)

    async def main() -> None:
        async with registered(entry, beat_s=0.01):
            await asyncio.sleep(0.05)  # it cannot be written, and the node serves anyway
            entry.path.parent.mkdir()
            await until(entry.path.exists)
            await asyncio.to_thread(entry.path.unlink)
            await until(entry.path.exists)
        assert not entry.path.exists()

    asyncio.run(main())


def test_a_file_that_is_the_same_at_another_place_is_still_the_node_s(tmp_path: Path) -> None:
    entry = FolderEntry(tmp_path, A)
    entry.write()
    copy = tmp_path / "copy"
    copy.write_bytes(entry.path.read_bytes())
    copy.rename(entry.path)  # as when the folder is restored
    assert entry.beat()
    entry.remove()
    assert not entry.path.exists()


def test_a_node_that_was_left_out_is_back_once_the_other_one_is_gone(tmp_path: Path) -> None:
    second = FolderEntry(tmp_path, Member(id="a", agent="127.0.0.1:7002"))
    asked = list[bool]()

    class Counted(FolderEntry):
        def beat(self) -> bool:
            asked.append(super().beat())
            return asked[-1]

    first = Counted(tmp_path, A)

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60.0):
            while not holds():  # noqa: ASYNC110 a file says nothing by itself
                await asyncio.sleep(0.01)

    async def main() -> None:
        async with registered(first, beat_s=0.01):
            await until(lambda: True in asked)
            second.write()
            await until(lambda: False in asked)
            assert b"7002" in first.path.read_bytes()
            second.remove()
            await until(lambda: first.path.exists() and b"7001" in first.path.read_bytes())

    asyncio.run(main())


def test_a_folder_that_never_answers_does_not_keep_a_node_that_ends(tmp_path: Path) -> None:
    never = threading.Event()

    class Hung(FolderEntry):
        def write(self) -> None:
            never.wait(20.0)

        def remove(self) -> None:
            never.wait(20.0)

    async def main() -> float:
        began = asyncio.get_running_loop().time()
        async with registered(Hung(tmp_path, A), patience_s=0.05):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) < 10.0
    never.set()


def test_how_a_registration_fails_after_the_node_has_ended_is_no_unforeseen_error(tmp_path: Path) -> None:
    began, ended = threading.Event(), threading.Event()
    unforeseen = list[object]()

    class Late(FolderEntry):
        def write(self) -> None:
            began.set()
            ended.wait(20.0)
            raise OSError("closed meanwhile")

    def join() -> None:
        ended.set()
        for thread in threading.enumerate():
            if thread.name == "registration":
                thread.join()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unforeseen.append(context))
        async with registered(Late(tmp_path, A)):
            await asyncio.to_thread(began.wait)
        await asyncio.to_thread(join)
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(main())
    assert unforeseen == []


def test_a_registration_that_a_file_server_holds_up_is_logged_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    class Slow(FolderEntry):
        def write(self) -> None:
            answers.wait(60.0)
            super().write()

    async def main() -> None:
        entry = Slow(tmp_path, A)
        async with registered(entry, patience_s=0.05):
            await until(lambda: "has not answered" in caplog.text)
            answers.set()
            await until(entry.path.exists)

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
