"""Any sequence of views ends in the last one, and no failure takes a member away."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from membership.changes import ChangeKind, changes
from membership.fleet import MemberFleet
from membership.member import Member
from membership.view import RegistryReading, View

IDS = st.sampled_from([f"d{number}" for number in range(6)])
WORDS = st.sampled_from(["", "prefill", "decode"])


@st.composite
def fleets(draw: st.DrawFn, *, least: int = 0) -> dict[str, Member]:
    ids = draw(st.sets(IDS, min_size=least))
    return {
        id_: Member(
            id=id_,
            agent=f"10.0.0.{draw(st.integers(1, 9))}:7001",
            role=draw(WORDS),
            revision=draw(st.sampled_from(["", "r1", "r2"])),
        )
        for id_ in ids
    }


def applied(members: Mapping[str, Member], wanted: Mapping[str, Member]) -> tuple[dict[str, Member], set[str]]:
    """What follows when every change is carried out, and the ids that were touched by a join or a leave."""
    found, renewed = dict(members), set[str]()
    for change in changes(members, wanted):
        if change.kind in (ChangeKind.JOINED, ChangeKind.LEFT):
            renewed.add(change.id)
        if change.after is None:
            del found[change.id]
        else:
            assert (change.kind is ChangeKind.JOINED) == (change.id not in found)
            found[change.id] = change.after
    return found, renewed


@given(st.lists(fleets(), max_size=6))
def test_changes_carried_out_one_after_the_other_end_in_the_last_view(steps: list[dict[str, Member]]) -> None:
    now: dict[str, Member] = {}
    for wanted in steps:
        stay = now.keys() & wanted.keys()
        now, renewed = applied(now, wanted)
        assert now == wanted
        assert not stay & renewed  # one that stays keeps its identity, whatever else changes


@given(fleets())
def test_the_same_view_changes_nothing(members: dict[str, Member]) -> None:
    assert list(changes(members, dict(members))) == []


def test_each_kind_of_change_is_told_apart() -> None:
    before = Member(id="d0", agent="10.0.0.1:7001", role="decode", revision="r1")
    after = Member(id="d0", agent="10.0.0.2:7001", role="prefill", revision="r2")
    found = list(changes({"d0": before, "d1": before}, {"d0": after, "d2": after}))
    assert [change.kind for change in found] == ["left", "moved", "role", "details", "joined"]
    assert [str(change) for change in found] == [
        "has left",
        "moves from 10.0.0.1:7001 to 10.0.0.2:7001",
        "is listed as prefill, was as decode",
        "is listed with other details",
        "has joined at 10.0.0.2:7001",
    ]


@given(st.lists(st.one_of(st.none(), fleets()), max_size=8))
def test_a_failure_or_an_empty_list_takes_no_member_away(steps: list[dict[str, Member] | None]) -> None:
    view, last = View(), dict[str, Member]()
    for at, found in enumerate(steps):
        if found is None:
            view = view.failed("it is not there", float(at))
        else:
            view = view.read(RegistryReading(members=tuple(found.values())), float(at))
            last = found or last
        assert view.members == last
        is_fresh = found is not None and (bool(found) or not last)
        assert view.state == ("fresh" if is_fresh else "frozen" if view.is_synced else "unread")


def test_a_view_is_frozen_since_the_first_failure() -> None:
    view = View().read(RegistryReading(members=[Member(id="d0", agent="10.0.0.1:7001")]), 1.0)
    view = view.failed("it is not there", 2.0).failed("not valid TOML", 5.0)
    assert (view.frozen_s(12.0), view.reason, view.state) == (10.0, "not valid TOML", "frozen")
    back = view.read(RegistryReading(members=tuple(view.members.values())), 13.0)
    assert (back.frozen_s(14.0), back.state) == (0.0, "fresh")


def test_a_list_without_a_usable_member_freezes_the_view_and_says_what_is_wrong_with_each() -> None:
    view = View().read(RegistryReading(members=[Member(id="d0", agent="10.0.0.1:7001")]), 1.0)
    view = view.read(RegistryReading(problems=("d0: its role is 'x'",), left_out={"role": 1}), 2.0)
    assert (view.state, {*view.members}, view.problems, view.left_out) == (
        "frozen",
        {"d0"},
        ("d0: its role is 'x'",),
        {"role": 1},
    )


@given(fleets(), fleets())
def test_of_two_registries_the_first_one_counts(first: dict[str, Member], second: dict[str, Member]) -> None:
    fleet = MemberFleet().seen("file", View(members=first, is_synced=True)).seen("folder", View(members=second))
    members, sources = fleet.members(), fleet.sources()
    assert members.keys() == sources.keys()
    agents = [member.agent for member in members.values()]
    assert len(agents) == len(set(agents))
    for id_, member in members.items():
        assert member == (first if sources[id_] == "file" else second)[id_]
    for id_ in second.keys() - members.keys():
        assert any(id_ in clash for clash in fleet.clashes())
    assert not fleet.is_synced
