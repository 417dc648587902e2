"""Registries that are files, as they are written, broken and lost."""

import os
from pathlib import Path

import pytest

from membership.errors import SourceFailed
from membership.member import Member
from membership.registration import STALE_S, FolderEntry
from membership.sources import MAX_ENTRY_BYTES, FileSource, FolderSource, Source
from membership.view import View


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def put(path: Path, text: str) -> None:
    """As a whole, by a rename."""
    hidden = path.with_name(".new")
    hidden.write_text(text)
    hidden.rename(path)


def listing(*ids: str) -> str:
    return "".join(f'[[nodes]]\nid = "{id_}"\nagent = "127.0.0.1:{7001 + number}"\n' for number, id_ in enumerate(ids))


def ids(source: Source) -> list[str] | None:
    reading = source.look()
    return [member.id for member in reading.members] if reading is not None else None


def failure(source: Source) -> str:
    with pytest.raises(SourceFailed) as failed:
        source.look()
    return failed.value.reason


def test_a_file_is_read_when_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    source = FileSource(path)
    assert failure(source) == "missing"
    put(path, listing("a"))
    assert [ids(source), ids(source)] == [["a"], None]
    put(path, listing("a", "b"))
    assert [ids(source), ids(source)] == [["a", "b"], None]
    put(path, "[[nodes")
    assert [failure(source), failure(source)] == ["malformed"] * 2
    put(path, listing("b"))
    assert ids(source) == ["b"]


def test_a_file_that_stays_broken_holds_no_more_with_each_look(tmp_path: Path) -> None:
    put(tmp_path / "nodes.toml", "[[nodes")
    source = FileSource(tmp_path / "nodes.toml")

    def frames() -> int:
        with pytest.raises(SourceFailed) as failed:
            source.look()
        return len(failed.traceback)

    frames()
    assert frames() == frames()


def test_a_file_that_is_written_in_place_is_read_once_it_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(listing("a"))
    source = FileSource(path)
    assert ids(source) == ["a"]
    whole = listing("a", "b", "c")
    with path.open("w") as file:
        file.write(whole[: len(listing("a", "b"))])
        file.flush()
        assert ids(source) is None
        file.write(whole[len(listing("a", "b")) :])
    assert [ids(source), ids(source), ids(source)] == [None, ["a", "b", "c"], None]


def test_what_is_no_file_or_too_long_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nodes.toml")
    assert failure(FileSource(tmp_path / "nodes.toml")) == "unreadable"
    (tmp_path / "nodes.json").write_bytes(b" " * ((1 << 20) + 1))
    assert failure(FileSource(tmp_path / "nodes.json")) == "too_long"


def entry(folder: Path, id_: str, port: int = 7001) -> FolderEntry:
    return FolderEntry(folder, Member(id=id_, agent=f"127.0.0.1:{port}"))


def test_nodes_of_a_folder_come_and_go_with_their_files(tmp_path: Path) -> None:
    source = FolderSource(tmp_path, Clock())
    assert ids(source) == []
    first, second = entry(tmp_path, "a"), entry(tmp_path, "b", 7002)
    first.write()
    second.write()
    assert [ids(source), ids(source)] == [["a", "b"], None]
    first.remove()
    assert ids(source) == ["b"]
    entry(tmp_path, "b", 7003).write()
    reading = source.look()
    assert reading is not None
    assert [member.agent for member in reading.members] == ["127.0.0.1:7003"]


def believed(source: Source, view: View) -> View:
    reading = source.look()
    return view.read(reading, 0.0) if reading is not None else view


def test_the_last_node_of_a_folder_may_leave_and_not_all_at_once(tmp_path: Path) -> None:
    source, view = FolderSource(tmp_path / "fleet", Clock()), View()
    (tmp_path / "fleet").mkdir()
    first, second = entry(tmp_path / "fleet", "a"), entry(tmp_path / "fleet", "b", 7002)
    first.write()
    second.write()
    view = believed(source, view)
    first.remove()
    second.remove()
    lost = believed(source, view)
    assert (lost.state, [*lost.members]) == ("frozen", ["a", "b"])
    first.write()
    view = believed(source, lost)
    assert [*view.members] == ["a"]
    first.remove()
    view = believed(source, view)
    assert (view.state, [*view.members]) == ("fresh", [])


def test_a_folder_that_is_another_one_is_not_believed_when_it_is_empty(tmp_path: Path) -> None:
    source = FolderSource(tmp_path / "fleet", Clock())
    (tmp_path / "fleet").mkdir()
    entry(tmp_path / "fleet", "a").write()
    view = believed(source, View())
    (tmp_path / "fleet").rename(tmp_path / "elsewhere")  # as when it is not mounted any more
    (tmp_path / "fleet").mkdir()
    assert believed(source, view).state == "frozen"


def test_an_entry_that_is_broken_leaves_its_node_as_it_was(tmp_path: Path) -> None:
    source = FolderSource(tmp_path, Clock())
    for id_, port in (("a", 7001), ("b", 7002)):
        entry(tmp_path, id_, port).write()
    assert ids(source) == ["a", "b"]
    put(tmp_path / "a.json", "{")
    put(tmp_path / "c.json", '{"id": "a", "agent": "127.0.0.1:9"}')
    put(tmp_path / "d.json", " " * (MAX_ENTRY_BYTES + 1))
    reading = source.look()
    assert reading is not None
    assert [member.id for member in reading.members] == ["a", "b"]
    assert [problem.partition(": ")[0] for problem in reading.problems] == [
        str(tmp_path / name) for name in ("a.json", "c.json", "d.json")
    ]
    assert ids(source) is None


def test_a_node_that_does_not_touch_its_file_has_left_while_others_do(tmp_path: Path) -> None:
    clock = Clock()
    source = FolderSource(tmp_path, clock)
    alive, dead = entry(tmp_path, "a"), entry(tmp_path, "b", 7002)
    alive.write()
    dead.write()
    assert ids(source) == ["a", "b"]
    for beat in range(1, 14):
        clock.now = 10.0 * beat
        os.utime(alive.path, ns=(beat, beat))
        found = ids(source)
    assert found == ["a"]
    for beat in range(14, 27):
        clock.now = 10.0 * beat
        if beat < 26:
            assert ids(source) is None
    assert failure(source) == "silent"
    assert alive.beat()
    assert ids(source) is None


def test_a_folder_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    source = FolderSource(tmp_path / "fleet", Clock())
    assert failure(source) == "missing"
    (tmp_path / "fleet").write_text("")
    assert failure(source) == "unreadable"


def test_a_node_removes_only_its_own_file(tmp_path: Path) -> None:
    first = entry(tmp_path, "a")
    first.write()
    again = entry(tmp_path, "a", 7002)
    again.write()
    assert not first.beat()
    first.remove()
    assert again.path.exists()
    again.path.unlink()
    assert again.beat()
    assert again.path.exists()
    again.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_could_not_be_read_for_a_moment_is_no_problem_any_more(tmp_path: Path) -> None:
    entry = FolderEntry(tmp_path, Member(id="a", agent="127.0.0.1:7001"))
    entry.write()
    source = FolderSource(tmp_path)
    assert ids(source) == ["a"]
    text = entry.path.read_bytes()
    entry.path.unlink()
    entry.path.mkdir()  # which even root cannot read as a file
    reading = source.look()
    assert reading is not None
    assert ([member.id for member in reading.members], len(reading.problems)) == (["a"], 1)
    entry.path.rmdir()
    entry.path.write_bytes(text)
    reading = source.look()
    assert reading is not None
    assert ([member.id for member in reading.members], reading.problems) == (["a"], ())


def test_a_node_whose_file_is_touched_and_cannot_be_read_has_not_left(tmp_path: Path) -> None:
    clock = Clock()
    entry, other = (FolderEntry(tmp_path, Member(id=id_, agent=f"{id_}:7001"), lease_s=30.0) for id_ in "ab")
    entry.write()
    other.write()
    source = FolderSource(tmp_path, clock)
    assert ids(source) == ["a", "b"]
    entry.path.unlink()
    entry.path.mkdir()
    for number in range(10):
        clock.now += 5.0
        os.utime(entry.path, ns=(0, number))
        os.utime(other.path, ns=(0, number))
        assert ids(source) in (None, ["a", "b"])


def test_a_folder_that_is_silent_says_so_in_the_same_words(tmp_path: Path) -> None:
    clock = Clock()
    FolderEntry(tmp_path, Member(id="a", agent="127.0.0.1:7001"), lease_s=30.0).write()
    source, said = FolderSource(tmp_path, clock), set[str]()
    for _ in range(12):
        try:
            source.look()
        except SourceFailed as failed:
            said.add(str(failed))
        clock.now += 5.0
    assert len(said) == 1


def test_living_nodes_take_away_what_killed_ones_left_a_day_ago(tmp_path: Path) -> None:
    living, killed, late, patient = (entry(tmp_path, id_) for id_ in ("living", "killed", "late", "patient"))
    patient = FolderEntry(tmp_path, Member(id="patient", agent="127.0.0.1:7001"), lease_s=10 * STALE_S)
    for each in (living, killed, late, patient):
        each.write()
    put(tmp_path / "own.json", '{"id": "own", "agent": "127.0.0.1:7001"}')  # an operator's: it has no lease
    put(tmp_path / "broken.json", "[[[")
    put(tmp_path / "notes.txt", "")
    now = os.stat(living.path).st_mtime
    for path in tmp_path.iterdir():
        os.utime(path, (now, now - STALE_S - (60 if path != late.path else -60)))
    assert living.beat()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"living.json", "late.json", "patient.json", "own.json", "broken.json", "notes.txt"}
    assert killed.beat()  # it was only stopped: it is back
    assert killed.path.exists()
