"""What a gateway makes of an etcd that fails, lies or says nothing; against the double, by a clock that tests move."""

import copy
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from membership.documents import entry_text
from membership.errors import SourceFailed
from membership.etcd.client import EtcdClient
from membership.etcd.entry import EtcdEntry
from membership.etcd.settings import EtcdConfig
from membership.etcd.source import ANSWER_S, ASK_S, EtcdSource
from membership.member import Member
from membership.sources import MAX_ENTRIES
from membership.view import RegistryReading
from tests.membership.etcd.double import EtcdDouble
from tests.membership.etcd.servers import CALL_S, Clock, until
from tests.transport.path.ports import free_port
from transport.control.proto.etcd_pb2 import EtcdKeyValue

LISTED = "/prfaas/nodes/listed/"
IN_VAIN_S = 0.4  # for an answer that does not come


@pytest.fixture
def etcd() -> Iterator[EtcdDouble]:
    double = EtcdDouble(Clock())
    double.start()
    yield double
    double.stop()


class Looking:
    """A source, by a clock of its own: a look comes a quarter of a second after the other."""

    def __init__(self, config: EtcdConfig, call_s: float = CALL_S) -> None:
        self.clock = Clock()
        self.source = EtcdSource(config, self.clock, np.random.default_rng(1), EtcdClient(config, call_s=call_s))
        self.reading = RegistryReading()
        self.failed: SourceFailed | None = None

    def look(self) -> None:
        self.clock.now += 0.25
        try:
            self.reading = self.source.look() or self.reading
            self.failed = None
        except SourceFailed as failure:
            self.failed = failure

    def sees(self, *ids: str) -> None:
        """Sooner or later."""

        def are_there() -> bool:
            self.look()
            return self.failed is None and sorted(member.id for member in self.reading.members) == sorted(ids)

        until(are_there)

    def failure(self, words: str = "") -> SourceFailed:
        """The next one that says so."""

        def is_told() -> bool:
            self.look()
            return self.failed is not None and words in str(self.failed)

        until(is_told)
        failed = self.failed
        assert failed is not None
        return failed


@pytest.fixture
def look(etcd: EtcdDouble) -> Iterator[Looking]:
    looking = Looking(EtcdConfig(endpoints=(etcd.endpoint,)))
    yield looking
    looking.source.close()


def lists(etcd: EtcdDouble, *ids: str) -> None:
    for id_ in ids:
        etcd.put(f"{LISTED}{id_}", entry_text(Member(id=id_, agent=f"{id_}:7001"), 0.0))


def test_a_connection_that_says_nothing_any_more_is_found_out(etcd: EtcdDouble) -> None:
    look = Looking(EtcdConfig(endpoints=(etcd.endpoint,)), IN_VAIN_S)
    lists(etcd, "a")
    look.sees("a")
    etcd.is_silent = True
    began_at = look.clock.now
    look.failure("no answer")
    assert ASK_S < look.clock.now - began_at < ASK_S + ANSWER_S + 1.0
    etcd.is_silent = False
    lists(etcd, "b")
    look.sees("a", "b")
    look.source.close()


def test_a_connection_on_which_nothing_changes_is_not_given_up(etcd: EtcdDouble, look: Looking) -> None:
    lists(etcd, "a")
    look.sees("a")
    until(lambda: etcd.watches_begun == 1)
    while look.clock.now < 2 * (ASK_S + ANSWER_S):
        time.sleep(0.05)  # for etcd to answer: it has a second, which are five by this clock
        look.look()
        assert look.failed is None
    assert etcd.watches_begun == 1


def test_another_endpoint_is_asked_where_one_fails(etcd: EtcdDouble) -> None:
    lists(etcd, "a")
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it accepts, and never answers
        never = f"http://127.0.0.1:{mute.getsockname()[1]}"
        nowhere = f"127.0.0.1:{free_port()}"
        look = Looking(EtcdConfig(endpoints=(nowhere, etcd.endpoint)))
        look.look()
        assert (look.failed, len(look.reading.members)) == (None, 1)
        look.source.close()
        alone = Looking(EtcdConfig(endpoints=(nowhere, never)), IN_VAIN_S)
        said = f"etcd does not answer: {nowhere}: connection refused; {never[7:]}: no answer within 1 s"
        assert [str(alone.failure(said)) for _ in range(2)] == [said] * 2
        alone.source.close()


def test_a_failure_is_not_tried_again_at_once(etcd: EtcdDouble, look: Looking) -> None:
    etcd.stop()
    first = look.failure()
    with pytest.raises(SourceFailed) as again:
        look.source.look()
    assert again.value is first
    look.clock.now += 10.0
    assert look.failure() is not first


def test_a_watch_that_ends_is_begun_anew_at_once(etcd: EtcdDouble, look: Looking) -> None:
    lists(etcd, "a")
    look.sees("a")
    lists(etcd, "b")
    look.sees("a", "b")
    until(lambda: etcd.watches_begun)
    etcd.end_watches("etcdserver: no leader")
    lists(etcd, "c")

    def is_over() -> bool:
        look.look()
        return look.failed is not None or len(look.reading.members) == 3

    until(is_over)
    assert look.failed is None


def test_changes_that_are_compacted_before_they_are_read_are_listed(etcd: EtcdDouble, look: Looking) -> None:
    lists(etcd, "a")
    etcd.state.compacted = etcd.state.revision + 10
    look.failure("forgets what has changed")
    lists(etcd, "b")
    etcd.state.compacted = etcd.state.revision
    look.sees("a", "b")


def test_another_etcd_at_the_same_address_is_told(etcd: EtcdDouble, look: Looking) -> None:
    lists(etcd, "a", "b")
    look.sees("a", "b")
    etcd.stop()
    etcd.state.cluster = 2
    etcd.delete(f"{LISTED}b")
    etcd.start()

    def is_told() -> bool:
        look.look()
        return bool(look.reading.problems)

    until(is_told)
    assert "etcd is another one" in look.reading.problems[0]


def test_an_etcd_that_is_back_at_a_time_after_the_watch_began_is_told(etcd: EtcdDouble, look: Looking) -> None:
    lists(etcd, "a")
    look.sees("a")
    lists(etcd, "b")
    look.sees("a", "b")
    backup = copy.deepcopy(etcd.state)
    lists(etcd, "c")
    look.sees("a", "b", "c")
    etcd.stop()
    etcd.state = backup
    etcd.start()

    def is_told() -> bool:
        look.look()
        return bool(look.reading.problems)

    until(is_told)
    assert "etcd is restored from a backup" in look.reading.problems[0]
    look.sees("a", "b", "c")


def with_password(etcd: EtcdDouble, folder: Path, password: str = "right") -> EtcdConfig:
    file = folder / "password"
    file.write_text(f"{password}\n")
    etcd.state.passwords = {"gateway": "right"}
    return EtcdConfig(endpoints=(etcd.endpoint,), user="gateway", password_file=file)


def test_a_token_that_etcd_no_longer_knows_is_renewed(etcd: EtcdDouble, tmp_path: Path) -> None:
    config = with_password(etcd, tmp_path)
    look = Looking(config)
    node = EtcdEntry(config, Member(id="a", agent="127.0.0.1:7001"))
    node.write()
    look.sees("a")
    etcd.tokens.clear()
    assert node.beat()
    until(lambda: etcd.watches_begun)
    etcd.end_watches("rpc error: code = Unauthenticated desc = etcdserver: invalid auth token")
    etcd.tokens.clear()
    lists(etcd, "b")
    look.sees("a", "b")
    look.source.close()
    node.remove()


def test_a_password_is_not_checked_again_for_another_endpoint(etcd: EtcdDouble, tmp_path: Path) -> None:
    client = EtcdClient(with_password(etcd, tmp_path))
    for _ in range(3):
        client.range(LISTED.encode())
        client.leave_endpoint()
    client.close()
    assert etcd.logins == 1


def test_a_wrong_password_and_no_password_are_told(etcd: EtcdDouble, tmp_path: Path) -> None:
    for config in (with_password(etcd, tmp_path, "wrong"), EtcdConfig(endpoints=(etcd.endpoint,))):
        look = Looking(config)
        failure = look.failure()
        assert failure.reason == "denied"
        assert str(failure).startswith(f"etcd at 127.0.0.1:{etcd.port}: ")
        look.source.close()
    look = Looking(EtcdConfig(endpoints=(etcd.endpoint,), user="gateway", password_file=tmp_path / "nowhere"))
    assert look.failure().reason == "unreadable"
    look.source.close()


def test_more_nodes_than_a_gateway_takes_freeze_the_view(etcd: EtcdDouble, look: Looking) -> None:
    lists(etcd, "a")
    look.sees("a")
    known = etcd.state.keys[f"{LISTED}a".encode()]
    etcd.state.keys |= {f"{LISTED}{number}".encode(): known for number in range(MAX_ENTRIES)}
    until(lambda: etcd.watches_begun)
    etcd.end_watches("etcdserver: no leader")
    assert look.failure("more than").reason == "too_many"
    left = [EtcdKeyValue(key=f"{LISTED}{number}".encode()) for number in range(MAX_ENTRIES - 1)]
    etcd.state.keys = {known.key: known} | {kv.key: kv for kv in left}
    look.sees("a")
    lists(etcd, "b")  # as the watch tells
    assert look.failure("more than").reason == "too_many"


def test_values_that_are_far_too_long_are_read_in_small_pages(etcd: EtcdDouble) -> None:
    look = Looking(EtcdConfig(endpoints=(etcd.endpoint,)))
    sizes = [2 << 20, *([1 << 20] * 16)]
    for number, size in enumerate(sizes):
        etcd.put(f"{LISTED}big{number}", b"x" * size)
    lists(etcd, "a")
    look.sees("a")
    assert len(look.reading.problems) == len(sizes)
    assert all("longer than 65536 bytes" in problem for problem in look.reading.problems)
    look.source.close()


def test_tls_to_a_plain_port_is_told_in_words(etcd: EtcdDouble) -> None:
    look = Looking(EtcdConfig(endpoints=(f"https://127.0.0.1:{etcd.port}",)))
    look.failure(f"etcd does not answer: 127.0.0.1:{etcd.port}: it does not speak TLS")
    look.source.close()


def test_a_source_that_is_closed_says_so(etcd: EtcdDouble, look: Looking) -> None:
    look.look()
    assert look.failed is None
    look.source.close()
    assert look.failure().reason == "unreachable"


def test_what_a_restored_etcd_has_of_an_earlier_start_of_a_node_is_replaced(etcd: EtcdDouble, look: Looking) -> None:
    config = EtcdConfig(endpoints=(etcd.endpoint,))
    before, now = (EtcdEntry(config, Member(id="a", agent=f"127.0.0.1:{port}")) for port in (7001, 7002))
    before.write()
    backup = copy.deepcopy(etcd.state)
    now.write()
    etcd.stop()
    etcd.state = backup
    etcd.start()
    assert now.beat()
    assert b"127.0.0.1:7002" in etcd.state.keys[b"/prfaas/nodes/registered/a"].value
    assert not before.beat()
