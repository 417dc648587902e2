"""What gateways and nodes see of an etcd: the same of the double and of a real one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from membership.documents import entry_text
from membership.errors import EditRefused, SourceFailed
from membership.etcd.client import EtcdClient
from membership.etcd.edit import EtcdEditor
from membership.etcd.entry import EtcdEntry
from membership.etcd.listing import GRACE_S
from membership.etcd.settings import EtcdConfig
from membership.etcd.source import EtcdSource
from membership.member import Member
from membership.view import RegistryReading, View
from tests.membership.etcd.servers import CALL_S, Clock, DoubledEtcd, EtcdUnderTest, RealEtcd, needed_binary, until

A, B, C = (Member(id=id_, agent=f"127.0.0.1:{port}") for id_, port in (("a", 7001), ("b", 7002), ("c", 7003)))
LEASE_S = 3.0
LISTED, REGISTERED = "/prfaas/nodes/listed/", "/prfaas/nodes/registered/"


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.long)])
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdUnderTest]:
    server: EtcdUnderTest = DoubledEtcd() if request.param == "double" else RealEtcd(tmp_path, needed_binary())
    try:
        server.start()
        yield server
    finally:
        server.close()


class Watching:
    """A gateway's view of an etcd, by a clock that tests move."""

    def __init__(self, etcd: EtcdUnderTest, **more: object) -> None:
        config = EtcdConfig(endpoints=(etcd.endpoint,), **more)  # type: ignore[arg-type]
        self.clock = Clock()
        self.source = EtcdSource(config, self.clock, np.random.default_rng(1), EtcdClient(config, call_s=CALL_S))
        self.view = View()
        self._said = RegistryReading()

    def look(self) -> View:
        self.clock.now += 0.25
        try:
            reading = self.source.look()
        except SourceFailed as failure:
            self.view = self.view.failed(f"{failure.reason}: {failure}", self.clock.now)
        else:
            if reading is not None or self.view.frozen_since is not None:
                self._said = reading or self._said
                self.view = self.view.read(self._said, self.clock.now)
        return self.view

    def sees(self, *members: Member) -> None:
        wanted = {member.id: member for member in members}
        until(lambda: self.look().state == "fresh" and self.view.members == wanted)


@pytest.fixture
def gateway(etcd: EtcdUnderTest) -> Iterator[Watching]:
    watching = Watching(etcd)
    yield watching
    watching.source.close()


def entry(etcd: EtcdUnderTest, member: Member, lease_s: float = LEASE_S) -> EtcdEntry:
    return EtcdEntry(EtcdConfig(endpoints=(etcd.endpoint,)), member, lease_s)


def test_nodes_come_move_and_go(etcd: EtcdUnderTest, gateway: Watching) -> None:
    gateway.sees()
    first, second = entry(etcd, A), entry(etcd, B)
    first.write()
    second.write()
    gateway.sees(A, B)
    assert first.beat()
    first.remove()
    gateway.sees(B)
    moved = Member(id="b", agent="127.0.0.1:7009")
    again = entry(etcd, moved)
    again.write()
    gateway.sees(moved)
    assert not second.beat()
    second.remove()  # which leaves the other one's
    assert again.beat()
    gateway.sees(moved)
    again.remove()
    gateway.sees()


def test_a_node_that_was_left_out_is_back_once_the_other_one_has_gone(etcd: EtcdUnderTest, gateway: Watching) -> None:
    first, second = entry(etcd, A), entry(etcd, Member(id="a", agent="127.0.0.1:7009"))
    first.write()
    second.write()
    assert not first.beat()
    second.remove()
    assert first.beat()
    gateway.sees(A)


def test_a_lease_that_runs_out_takes_its_node_away_and_no_other(etcd: EtcdUnderTest, gateway: Watching) -> None:
    living, killed = entry(etcd, A, 60.0), entry(etcd, B)
    living.write()
    killed.write()
    EtcdEditor(EtcdConfig(endpoints=(etcd.endpoint,))).add(C)
    gateway.sees(A, B, C)
    etcd.waited(LEASE_S * 2 + 1.0)  # a real one takes its time
    gateway.look()
    gateway.sees(A, B, C)
    gateway.clock.now += GRACE_S
    gateway.sees(A, C)
    assert killed.beat()  # it was only cut off
    gateway.sees(A, B, C)


def test_where_all_leases_run_out_nodes_stay(etcd: EtcdUnderTest, gateway: Watching) -> None:
    nodes = [entry(etcd, A), entry(etcd, B)]
    for node in nodes:
        node.write()
    gateway.sees(A, B)
    etcd.waited(LEASE_S * 2 + 1.0)
    until(lambda: gateway.look().state == "frozen")
    gateway.clock.now += 1000.0
    assert gateway.look().state == "frozen"
    assert "no node renews its lease" in gateway.view.reason
    assert {*gateway.view.members} == {"a", "b"}
    assert all(node.beat() for node in nodes)
    gateway.sees(A, B)


def test_an_etcd_that_is_killed_freezes_the_view_and_is_back(etcd: EtcdUnderTest, gateway: Watching) -> None:
    node = entry(etcd, A, 60.0)
    node.write()
    gateway.sees(A)
    etcd.kill()
    until(lambda: gateway.look().reason.startswith("unreachable: etcd does not answer: 127.0.0.1:"))
    assert (gateway.view.state, {*gateway.view.members}) == ("frozen", {"a"})
    assert "connection refused" in gateway.view.reason
    with pytest.raises(OSError, match="does not answer"):
        node.beat()
    etcd.start()
    gateway.sees(A)
    assert node.beat()
    other = entry(etcd, B)
    other.write()
    gateway.sees(A, B)


def test_changes_that_were_compacted_while_etcd_was_away_are_seen(etcd: EtcdUnderTest, gateway: Watching) -> None:
    editor = EtcdEditor(EtcdConfig(endpoints=(etcd.endpoint,)))
    for member in (A, B):
        editor.add(member)
    gateway.sees(A, B)
    etcd.kill()
    until(lambda: gateway.look().state == "frozen")
    etcd.start()
    editor.remove("a")
    editor.add(C)
    etcd.compact()
    gateway.sees(B, C)


def test_a_prefix_that_is_suddenly_empty_is_not_believed(etcd: EtcdUnderTest, gateway: Watching) -> None:
    editor = EtcdEditor(EtcdConfig(endpoints=(etcd.endpoint,)))
    for member in (A, B):
        editor.add(member)
    gateway.sees(A, B)
    etcd.delete(f"{LISTED}a", f"{LISTED}b")
    until(lambda: gateway.look().state == "frozen")
    assert gateway.view.reason == "it lists no node any more; what it listed before stays"
    editor.add(C)
    gateway.sees(C)


def test_a_lease_that_etcd_has_lost_is_granted_anew(etcd: EtcdUnderTest, gateway: Watching) -> None:
    node = entry(etcd, A)
    node.write()
    etcd.waited(LEASE_S * 2 + 1.0)
    assert node.beat()
    gateway.sees(A)
    etcd.delete(f"{REGISTERED}a")
    assert node.beat()
    gateway.sees(A)
    etcd.put(f"{REGISTERED}a", entry_text(A, LEASE_S))  # as it was before the last start, without a lease
    assert node.beat()
    etcd.waited(LEASE_S * 2 + 1.0)
    until(lambda: "no node renews its lease" in gateway.look().reason)


def test_garbage_is_told_and_takes_no_node_away(etcd: EtcdUnderTest, gateway: Watching) -> None:
    EtcdEditor(EtcdConfig(endpoints=(etcd.endpoint,))).add(A)
    gateway.sees(A)
    for value in (b"", b"{", b"\xff", b'{"id": "b", "agent": "127.0.0.1:1"}', b"x" * 100_000):
        etcd.put(f"{LISTED}{'a' if value else 'b'}", value)
        etcd.put(f"{REGISTERED}{'n' * 2000}", value)
        etcd.put("/prfaas/nodes/leader", value)
    until(lambda: any("longer than" in problem for problem in gateway.look().problems))
    gateway.sees(A)


def test_an_operator_adds_and_removes(etcd: EtcdUnderTest) -> None:
    editor = EtcdEditor(EtcdConfig(endpoints=(etcd.endpoint,)))
    node = entry(etcd, C)
    node.write()
    editor.add(A)
    for again in (A, Member(id="a", agent="127.0.0.1:9"), Member(id="d", agent=A.agent), C):
        with pytest.raises(EditRefused, match="already"):
            editor.add(again)
    with pytest.raises(EditRefused, match="lists itself in etcd: end the node"):
        editor.remove("c")
    with pytest.raises(EditRefused, match=r"has no x; etcd lists a, c"):
        editor.remove("x")
    assert editor.remove(A.agent) == A
    node.remove()
    editor.add(A)
    with pytest.raises(EditRefused, match="the last node"):
        editor.remove("a")


def test_many_nodes_are_read_page_by_page(etcd: EtcdUnderTest, gateway: Watching) -> None:
    many = [Member(id=f"n{number}", agent=f"127.0.0.1:{number}") for number in range(1, 1100)]
    etcd.put_all({f"{LISTED}{member.id}": entry_text(member, 0.0) for member in many})
    gateway.sees(*many)
