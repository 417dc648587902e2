"""What keys of etcd come to: nodes that end, nodes that are killed, and an etcd that nodes do not reach."""

import pytest

from membership.documents import entry_text
from membership.errors import SourceFailed
from membership.etcd.listing import ANOTHER_S, GRACE_S, LEASE_S, MAX_PROBLEMS, EtcdListing, Snapshot, StoredKey
from membership.member import Member
from membership.sources import MAX_ENTRIES
from membership.view import View

ROOT = "/prfaas/nodes/"


def registered(id_: str, port: int = 7001, value: bytes | None = None) -> StoredKey:
    text = entry_text(Member(id=id_, agent=f"{id_}:{port}"), LEASE_S) if value is None else value
    return StoredKey(name=f"registered/{id_}", value=text, is_leased=True)


def listed(id_: str, port: int = 7001) -> StoredKey:
    text = entry_text(Member(id=id_, agent=f"{id_}:{port}"), 0.0)
    return StoredKey(name=f"listed/{id_}", value=text, is_leased=False)


def beginning(*keys: StoredKey, revision: int = 10, cluster: int = 1) -> Snapshot:
    return Snapshot(keys=keys, revision=revision, cluster=cluster)


def holding(*keys: StoredKey) -> EtcdListing:
    listing = EtcdListing(ROOT)
    listing.snapshot(beginning(*keys), 0.0)
    return listing


def ids(listing: EtcdListing, now: float = 0.0) -> list[str]:
    return [member.id for member in listing.reading(now).members]


def reason(listing: EtcdListing, now: float) -> str:
    with pytest.raises(SourceFailed) as failed:
        listing.reading(now)
    return failed.value.reason


def test_no_more_nodes_linger_than_a_gateway_takes() -> None:
    listing = holding(registered("a"))
    for number in range(MAX_ENTRIES + 2):
        listing.put(registered(f"n{number}"), 0.0)
        listing.delete(f"registered/n{number}", 11 + number, 0.0)
    assert len(ids(listing)) == 1 + MAX_ENTRIES


def test_a_node_that_is_killed_is_gone_a_while_after_its_lease() -> None:
    listing = holding(registered("a"), registered("b"))
    listing.delete("registered/a", 11, 0.0)
    assert ids(listing, GRACE_S - 0.1) == ["b", "a"] or ids(listing, GRACE_S - 0.1) == ["a", "b"]
    assert ids(listing, GRACE_S) == ["b"]


def test_a_node_that_ends_is_gone_at_once() -> None:
    listing = holding(registered("a"), registered("b"))
    listing.put(registered("a", value=b""), 0.0)
    assert ids(listing) == ["b"]
    listing.delete("registered/a", 12, 0.0)
    assert ids(listing) == ["b"]


def test_nodes_that_all_lose_etcd_stay_and_have_a_lease_to_be_back() -> None:
    listing = holding(registered("a"), registered("b"), registered("c"))
    for at, id_ in ((0.0, "a"), (5.0, "b")):
        listing.delete(f"registered/{id_}", 11, at)
        assert sorted(ids(listing, at)) == ["a", "b", "c"]
    listing.delete("registered/c", 12, 9.0)
    assert [reason(listing, at) for at in (9.0, 1000.0)] == ["silent"] * 2
    listing.put(registered("b"), 1000.0)
    assert sorted(ids(listing, 1000.0 + LEASE_S - 0.1)) == ["a", "b", "c"]
    listing.put(registered("a"), 1000.0)
    assert sorted(ids(listing, 1000.0 + LEASE_S)) == ["a", "b"]


def test_what_an_operator_lists_stays_until_it_is_removed() -> None:
    listing = holding(registered("a"), listed("b"))
    assert ids(listing, 1e6) == ["a", "b"]
    listing.delete("listed/b", 11, 1e6)
    assert ids(listing, 1e6) == ["a"]


def test_what_a_node_says_of_itself_comes_before_what_is_listed() -> None:
    listing = holding(listed("a", 9), registered("a", 7001), registered("b"))
    assert listing.reading(0.0).members[0].agent == "a:7001"
    listing.delete("registered/a", 11, 0.0)
    assert {member.agent for member in listing.reading(GRACE_S).members} == {"b:7001", "a:9"}


def test_the_last_one_may_leave_on_purpose_and_not_all_at_once() -> None:
    listing = holding(listed("a"), listed("b"))
    view = View().read(listing.reading(0.0), 0.0)
    listing.delete("listed/a", 11, 0.0)
    listing.delete("listed/b", 11, 0.0)
    assert view.read(listing.reading(0.0), 0.0).state == "frozen"
    listing = holding(listed("a"), listed("b"))
    listing.delete("listed/a", 11, 0.0)
    listing.delete("listed/b", 12, 0.0)
    assert view.read(listing.reading(0.0), 0.0).state == "fresh"
    listing = holding(registered("a"))
    listing.put(registered("a", value=b""), 0.0)
    assert listing.reading(0.0).is_empty_meant


def test_an_etcd_that_was_restored_has_nodes_register_again() -> None:
    for again in (beginning(registered("a"), revision=9), beginning(registered("a"), cluster=2)):
        listing = holding(registered("a"), registered("b"), listed("c"))
        listing.snapshot(again, 100.0)
        reading = listing.reading(100.0)
        assert sorted(member.id for member in reading.members) == ["a", "b", "c"]
        assert "etcd is" in reading.problems[0]
        listing.put(registered("b"), 101.0)
        assert ids(listing, 100.0 + ANOTHER_S) == ["a", "b"]
        assert listing.reading(100.0 + ANOTHER_S).problems == ()


def test_an_etcd_that_has_forgotten_all_is_not_believed() -> None:
    listing = holding(listed("a"), listed("b"))
    view = View().read(listing.reading(0.0), 0.0)
    listing.snapshot(beginning(cluster=2), 1.0)
    assert view.read(listing.reading(1.0), 1.0).state == "frozen"
    listing = holding(registered("a"))
    listing.snapshot(beginning(cluster=2), 1.0)
    assert reason(listing, 1.0) == "silent"


def test_what_was_missed_while_etcd_was_away_is_made_up_for() -> None:
    listing = holding(registered("a"), registered("b"), listed("c"))
    listing.snapshot(beginning(registered("b"), registered("d"), revision=20), 5.0)
    assert sorted(ids(listing, 5.0)) == ["a", "b", "d"]
    assert sorted(ids(listing, 5.0 + GRACE_S)) == ["b", "d"]


def test_a_value_that_cannot_be_used_leaves_the_node_as_it_was() -> None:
    listing = holding(registered("a"), registered("b"))
    for value in (b"{", b"\xff\x00", b"[1]", b'{"id": "a"}', registered("b").value, None):
        listing.put(StoredKey(name="registered/a", value=value, is_leased=True), 0.0)
        reading = listing.reading(0.0)
        assert [member.id for member in reading.members] == ["a", "b"]
        assert reading.problems[0].startswith("/prfaas/nodes/registered/a: ")
    listing.put(registered("a", 7002), 0.0)
    assert listing.reading(0.0).problems == ()


def test_nothing_says_farewell_for_what_an_operator_lists() -> None:
    listing = holding(registered("a"), listed("b"))
    listing.put(StoredKey(name="listed/b", value=b"", is_leased=False), 0.0)
    reading = listing.reading(0.0)
    assert [member.id for member in reading.members] == ["a", "b"]
    assert reading.problems[0].startswith("/prfaas/nodes/listed/b: ")


def test_there_are_never_many_problems_nor_long_ones() -> None:
    keys = [StoredKey(name=f"registered/{number}{'x' * 1000}", value=b"{", is_leased=True) for number in range(1000)]
    problems = holding(*keys).reading(0.0).problems
    assert len(problems) == MAX_PROBLEMS + 1
    assert max(map(len, problems)) < 1000
    assert "968 more" in problems[-1]


def test_other_keys_are_not_ours() -> None:
    listing = holding(registered("a"), StoredKey(name="leader", value=b"x", is_leased=True))
    assert listing.reading(0.0).problems == ()
    listing.delete("leader", 12, 0.0)
    assert ids(listing, 1e6) == ["a"]


def test_nothing_is_read_anew_where_nothing_differs() -> None:
    listing = holding(registered("a"))
    assert listing.reading(0.0) is listing.reading(1.0)
