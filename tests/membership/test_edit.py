"""A file of members is changed as a whole, or not at all."""

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from membership import edit
from membership.errors import EditRefused
from membership.member import Member

TEXT = """# the fleet
[[nodes]]
id = "a"  # the oldest
agent = "127.0.0.1:7001"

# in rack 4
[[nodes]]
id = "b"
agent = "127.0.0.1:7002"
[nodes.labels]
rack = "4"

[[ nodes ]]
agent = "127.0.0.1:7003"
"""
NEW = Member(id="d", agent="127.0.0.1:7004", labels={"rack": "5"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "nodes.toml").write_text(TEXT)
    return tmp_path / "nodes.toml"


def test_a_node_is_added_and_the_rest_stays_as_it_is(path: Path) -> None:
    path.chmod(0o640)
    edit.add(path, NEW)
    assert path.read_text().startswith(TEXT)
    assert [member.id for member in edit.listed(path)] == ["a", "b", "127.0.0.1:7003", "d"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in path.parent.iterdir()] == ["nodes.toml"]


@pytest.mark.parametrize(("node", "gone"), [("a", "a"), ("127.0.0.1:7002", "b"), ("127.0.0.1:7003", "127.0.0.1:7003")])
def test_a_node_is_removed_with_its_comments_alone(path: Path, node: str, gone: str) -> None:
    assert edit.remove(path, node).id == gone
    assert gone not in [member.id for member in edit.listed(path)]
    text = path.read_text()
    assert ("# the fleet" in text, "# in rack 4" in text) == (True, True)
    assert ("# the oldest" in text) == (gone != "a")


def test_a_file_in_json_and_one_that_is_not_there_yet(tmp_path: Path) -> None:
    for name in ("nodes.json", "new.toml"):
        edit.add(tmp_path / name, NEW)
        edit.add(tmp_path / name, Member(id="e", agent="127.0.0.1:7005"))
        assert edit.remove(tmp_path / name, "d") == NEW
        assert [member.id for member in edit.listed(tmp_path / name)] == ["e"]
    assert json.loads((tmp_path / "nodes.json").read_text()) == {"nodes": [{"id": "e", "agent": "127.0.0.1:7005"}]}


@pytest.mark.parametrize(
    ("member", "why"),
    [
        (Member(id="a", agent="127.0.0.1:9"), "has a already, at 127.0.0.1:7001"),
        (Member(id="z", agent="127.0.0.1:7001"), "has 127.0.0.1:7001 already, as a"),
    ],
)
def test_what_is_listed_already_is_not_added(path: Path, member: Member, why: str) -> None:
    with pytest.raises(EditRefused, match=why):
        edit.add(path, member)
    assert path.read_text() == TEXT


def test_what_cannot_be_removed_stays(path: Path) -> None:
    with pytest.raises(EditRefused, match="has no z; it lists a, b"):
        edit.remove(path, "z")
    edit.remove(path, "a")
    edit.remove(path, "b")
    with pytest.raises(EditRefused, match="is the last node"):
        edit.remove(path, "127.0.0.1:7003")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[nodes", "not valid TOML"),
        (
            'nodes = [{agent = "127.0.0.1:7001"}, {agent = "127.0.0.1:7002"}]',
            "in a way that this command cannot change",
        ),
    ],
)
def test_a_file_that_is_not_understood_is_left_alone(path: Path, text: str, why: str) -> None:
    path.write_text(text)
    with pytest.raises(EditRefused, match=why):
        edit.remove(path, "127.0.0.1:7001")
    assert path.read_text() == text


def test_a_file_of_llm_d_is_left_to_its_own_tools(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    path.write_text('{"endpoints": [{"name": "a", "address": "127.0.0.1", "port": "7001"}]}')
    with pytest.raises(EditRefused, match="file of llm-d"):
        edit.add(path, NEW)


def test_commands_at_one_time_lose_nothing(path: Path) -> None:
    new = [Member(id=f"n{number}", agent=f"127.0.0.1:{8000 + number}") for number in range(8)]
    adding = [threading.Thread(target=edit.add, args=(path, member)) for member in new]
    for each in adding:
        each.start()
    for each in adding:
        each.join()
    assert {member.id for member in edit.listed(path)} >= {member.id for member in new}


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    edit.add(link, NEW)
    assert link.is_symlink()
    assert "d" in [member.id for member in edit.listed(path)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_stays_its_owner_s(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text('[[nodes]]\nid = "a"\nagent = "127.0.0.1:7001"\n')
    path.chmod(0o600)
    os.chown(path, 4321, 4321)
    edit.add(path, Member(id="b", agent="127.0.0.1:7002"))
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (4321, 4321, 0o600)


def test_a_file_that_is_not_utf_8_is_left_as_it_is(path: Path) -> None:
    before = b"# caf\xe9\n" + TEXT.encode()
    path.write_bytes(before)
    with pytest.raises(EditRefused, match="not UTF-8 at byte 5"):
        edit.add(path, NEW)
    assert path.read_bytes() == before


def test_a_command_does_not_wait_for_ever_for_another_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit, "LOCK_TRIES", 2)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(EditRefused, match="another command"):
            edit.add(path, NEW)
    finally:
        os.close(folder)
    edit.add(path, NEW)
