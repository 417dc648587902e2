"""Sockets, places and words that go from a gateway to its successor, in one process."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.keyring import Tenant
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.errors import CannotListen, NotReplaced, TenantLimited
from gateway.main import StopSignals, serve
from gateway.ratelimit.limiter import TenantLimiters
from gateway.workers.generation import REPLACE, Generation, begun
from gateway.workers.handover import HandoverDoor, HandoverOffer, Predecessor, name_of
from gateway.workers.lineage import ALLOWANCES, METRICS, Lineage
from gateway.workers.ports import ListenerName, Ports, Sockets, fitting, passed_by_systemd
from gateway.workers.process_scope import SingleProcess
from gateway.workers.service_manager import READY, main_process, notify
from planner.decisions.admission.limits import TenantLimits
from tests.gateway.worlds import PATIENCE_S, on_loop, until, world
from tests.prompts.builders import text_tokenizer

CLIENTS, OPERATORS = ListenerName.CLIENTS, ListenerName.OPERATORS


def config(tmp_path: Path, **keys: Any) -> GatewayConfig:
    return GatewayConfig(tokenizer_dir=tmp_path, nodes=(NodeAddress(agent="127.0.0.1:1"),), **{"port": 0, **keys})


@contextmanager
def ports(config: GatewayConfig, given: Sockets = {}) -> Iterator[Ports]:  # noqa: B006 it stays as it is
    with closing(Ports(config, given)) as made:
        yield made


def test_every_worker_has_a_socket_of_its_own_on_one_port(tmp_path: Path) -> None:
    with ports(config(tmp_path, workers=3)) as p:
        made = [p.of(number)[CLIENTS][0] for number in range(3)]
        assert len({each.fileno() for each in made}) == 3
        assert {each.getsockname() for each in made} == {p.address}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 3), (3, 2), (2, 5)])
def test_what_waits_is_accepted_by_another_number_of_workers(tmp_path: Path, before: int, after: int) -> None:
    with ports(config(tmp_path, workers=before)) as old:
        for each in old.all()[CLIENTS]:
            each.listen()
        handed = {
            name: [socket.socket(fileno=os.dup(each.fileno())) for each in some] for name, some in old.all().items()
        }
        waiting = [socket.create_connection(old.address) for _ in range(8)]
        with ports(config(tmp_path, workers=after), handed) as new:
            old.close()
            accepted = 0
            for number in range(after):
                some = new.of(number)[CLIENTS]
                assert some
                for each in some:
                    each.setblocking(False)
                    accepted += sum(1 for _ in iter(lambda: _accepted(each), False))  # noqa: B023
            assert accepted == len(waiting)
        for client in waiting:
            client.close()


def _accepted(listening: socket.socket) -> bool:
    try:
        listening.listen()
        listening.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def test_a_worker_that_ended_leaves_its_socket_unless_others_share_it(tmp_path: Path) -> None:
    with ports(config(tmp_path, workers=2)) as p:
        before, other = p.of(0)[CLIENTS][0], p.of(1)[CLIENTS][0]
        p.renew(0)
        assert (before.fileno(), p.of(0)[CLIENTS][0].getsockname(), p.of(1)[CLIENTS][0]) == (-1, p.address, other)
    with socket.create_server(("127.0.0.1", 0)) as one, ports(config(tmp_path, workers=2), {CLIENTS: [one]}) as p:
        assert p.of(0) == p.of(1) == {CLIENTS: [one]}
        p.renew(0)
        assert p.of(0) == {CLIENTS: [one]}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_port_that_another_listens_on_is_refused(tmp_path: Path, workers: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotListen, match="choose another port"):
        Ports(config(tmp_path, workers=workers, port=taken.getsockname()[1]), {})


def test_sockets_of_a_port_that_the_file_does_not_name_any_more_are_not_taken_over(tmp_path: Path) -> None:
    with ports(config(tmp_path)) as p:
        assert fitting(p.all(), config(tmp_path)) == p.all()
        assert fitting(p.all(), config(tmp_path, port=p.address[1])) == p.all()
        assert fitting(p.all(), config(tmp_path, port=p.address[1] % 65535 + 1)) == {CLIENTS: []}
        assert fitting({OPERATORS: p.all()[CLIENTS]}, config(tmp_path)) == {}


@pytest.mark.parametrize("name", ["operators", "prfaas-gateway.socket", ""])
def test_systemd_passes_sockets_to_the_process_that_it_starts(tmp_path: Path, name: str) -> None:
    with ports(config(tmp_path)) as p:
        fd = os.dup(p.all()[CLIENTS][0].fileno())
        passed = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": name}
        assert passed_by_systemd(passed | {"LISTEN_PID": "1"}, config(tmp_path), fd) == {}
        assert passed_by_systemd({}, config(tmp_path), fd) == {}
        other = config(tmp_path, metrics_port=p.address[1] if not name else 1)
        ((listener, (one,)),) = passed_by_systemd(passed, other, fd).items()
        assert (listener, one.getsockname()) == (CLIENTS if "socket" in name else OPERATORS, p.address)
        one.close()


def test_systemd_hears_who_is_the_main_process(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notify({"NOTIFY_SOCKET": str(tmp_path / "notify")}, main_process(17), READY)
        assert manager.recv(100) == b"MAINPID=17\nREADY=1"
    notify({"NOTIFY_SOCKET": str(tmp_path / "no-one")}, READY)
    notify({}, READY)


def test_generations_have_places_of_their_own_until_they_have_ended(tmp_path: Path) -> None:
    first = Lineage.begun(tmp_path, 2)
    assert first.take(2) == 0
    second = Lineage.joined(first.path, os.dup(first.lock))
    assert second.take(3) == 2
    assert second.take(100) is None
    with closing(TenantLimiters(lambda: 0.0, first.path / ALLOWANCES, own=None)) as allowances:
        second.sweep(allowances)  # the first one lives
        assert second.take(15) == 5
        first.hand_on()
        first.close()
        second.take_over()
        second.sweep(allowances)
        assert second.take(2) == 0
    assert (second.path / METRICS).is_dir()
    second.close()
    assert not second.path.exists()


def test_a_limit_holds_for_both_generations_and_what_a_killed_one_had_is_free(tmp_path: Path) -> None:
    tenant = Tenant("acme", "acme", b"", TenantLimits(at_once=2))
    before = Lineage.begun(tmp_path, 1)
    after = Lineage.joined(before.path, os.dup(before.lock))
    path = before.path / ALLOWANCES
    old, new = (TenantLimiters(lambda: 0.0, path, own=each.take(1)) for each in (before, after))
    old.enter(tenant)
    stays = new.enter(tenant)
    with pytest.raises(TenantLimited):
        new.enter(tenant)
    old.close()
    before.hand_on()
    before.close()  # it was killed in the middle of its stream
    after.take_over()
    after.sweep(new)
    more = new.enter(tenant)
    with pytest.raises(TenantLimited):
        new.enter(tenant)
    for each in (stays, more):
        each.leave()
    new.close()
    after.close()


@on_loop
async def test_a_successor_has_the_sockets_before_it_says_that_it_serves(tmp_path: Path) -> None:
    name, left = name_of(tmp_path / "gateway.toml"), list[int]()
    lineage = Lineage.begun(tmp_path, 1)
    with ports(config(tmp_path)) as p:

        def offer() -> tuple[HandoverOffer, list[int]]:
            told = HandoverOffer(pid=os.getpid(), lineage=str(lineage.path), format="1", sockets={CLIENTS: 1})
            return told, [lineage.lock, p.all()[CLIENTS][0].fileno()]

        door = HandoverDoor(name, offer, left.append)
        assert await asyncio.to_thread(Predecessor.of, name) is None
        door.open()
        gone = await found(name)
        with pytest.raises(NotReplaced, match="another gateway is about to replace it already"):
            await asyncio.to_thread(Predecessor.of, name)
        gone.close()  # one that fails changes nothing
        await asyncio.sleep(0.05)
        successor = await found(name)
        assert [each.getsockname() for each in successor.sockets[CLIENTS]] == [p.address]
        assert left == []
        await asyncio.to_thread(successor.leave)
        assert left == [os.getpid()]
        assert await asyncio.to_thread(Predecessor.of, name) is None  # the name is free for the successor
        for each in (gone, successor):
            os.close(each.lock)
            each.sockets[CLIENTS][0].close()
    lineage.close()


async def found(name: str) -> Predecessor:
    predecessor = await asyncio.to_thread(Predecessor.of, name)
    assert predecessor is not None
    return predecessor


def test_a_gateway_is_found_by_the_path_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name_of(Path("gateway.toml")) == name_of(tmp_path / "gateway.toml") != name_of(tmp_path / "other.toml")


def test_no_word_of_a_stranger_is_believed(tmp_path: Path) -> None:
    name = name_of(tmp_path / "gateway.toml")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.bind(name)
        stranger.listen()
        with pytest.raises(NotReplaced, match="another user's process"):
            Predecessor.of(name, trusted=())


@asynccontextmanager
async def in_charge(tmp_path: Path, *command: str, workers: int = 1) -> AsyncIterator[Generation]:
    """A generation that has none before it; `command` is its successor's."""
    name, announced = name_of(tmp_path / "gateway.toml"), asyncio.Event()
    own = config(tmp_path, workers=workers)
    with begun(own, name, replaces=False, ready_s=1.0, successor=lambda: list(command)) as generation:
        generation.take_charge(lambda: None, announced.set)
        await announced.wait()
        try:
            yield generation
        finally:
            generation.stop()


@on_loop
async def test_what_was_offered_outlives_a_gateway_that_ends_before_its_successor_serves(tmp_path: Path) -> None:
    name = name_of(tmp_path / "gateway.toml")
    async with in_charge(tmp_path) as generation:
        successor = await found(name)
        generation.retire()
        assert await asyncio.to_thread(Predecessor.of, name) is None  # one that is told to end offers nothing
    lineage = Lineage.joined(successor.lineage, successor.lock)
    assert lineage.take(1) == 1
    successor.close()
    successor.sockets[CLIENTS][0].close()
    lineage.take_over()
    lineage.close()
    assert not successor.lineage.exists()


@on_loop
async def test_a_successor_does_not_have_the_pipe_of_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""
    async with in_charge(tmp_path, "/bin/echo", "it says"):
        os.kill(os.getpid(), REPLACE)
        async with asyncio.timeout(PATIENCE_S):
            while "it says" not in said:
                await asyncio.sleep(0.01)
                out, err = capfd.readouterr()
                said += err
                assert not out


@on_loop
async def test_a_successor_that_is_told_to_end_while_it_starts_is_not_in_charge(tmp_path: Path) -> None:
    seat = SingleProcess()
    seat.ready_s = PATIENCE_S
    name = name_of(tmp_path / "gateway.toml")
    with begun(config(tmp_path), name, replaces=False, ready_s=1.0, successor=list) as generation:
        usual = signal.getsignal(signal.SIGTERM)
        serving = asyncio.ensure_future(
            serve(config(tmp_path), text_tokenizer(), pytest.fail, pytest.fail, seat, generation)
        )
        await until(lambda: signal.getsignal(signal.SIGTERM) != usual)
        await asyncio.sleep(0.2)  # mostly until it waits for nodes
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(NotReplaced, match="the new one was told to end"):
            await serving
        assert await asyncio.to_thread(Predecessor.of, name) is None


@on_loop
async def test_requests_are_cut_by_the_second_signal_though_the_gateway_was_leaving_already() -> None:
    signals = StopSignals()
    signals.stop.set()  # another gateway serves
    signals.heard()
    assert not signals.stop_now.is_set()
    signals.heard()
    assert signals.stop_now.is_set()


def test_a_place_is_free_when_the_last_process_that_has_its_lock_has_ended(tmp_path: Path) -> None:
    before = Lineage.begun(tmp_path, 1)
    after = Lineage.joined(before.path, os.dup(before.lock))
    assert (before.take(1), after.take(1)) == (0, 1)
    (workers,) = map(os.dup, before.locks)
    before.close()  # the parent was killed
    after.take_over()
    with closing(TenantLimiters(lambda: 0.0, after.path / ALLOWANCES, own=None)) as allowances:
        after.sweep(allowances)
        assert after.take(1) == 2
        os.close(workers)
        after.sweep(allowances)
        assert after.take(1) == 0
    after.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_joined", [False, True])
def test_the_folder_goes_with_the_last_generation_that_joined(tmp_path: Path, has_joined: bool) -> None:
    before = Lineage.begun(tmp_path, 1)
    before.take(1)
    after = Lineage.joined(before.path, os.dup(before.lock)) if has_joined else Lineage.begun(tmp_path, 1)
    after.take(1)
    after.take_over()
    after.close()  # it may end before the one that it has replaced
    assert before.path.exists()
    before.close()
    assert not list(tmp_path.iterdir())


@on_loop
async def test_a_gateway_on_another_port_lets_go_of_the_old_one_and_another_host_is_refused(tmp_path: Path) -> None:
    name = name_of(tmp_path / "gateway.toml")

    def succeed(**keys: Any) -> Generation:
        return held.enter_context(begun(config(tmp_path, **keys), name, replaces=True, ready_s=1.0, successor=list))

    with ExitStack() as held:
        async with in_charge(tmp_path) as old:
            assert len(old.descriptors(0)) == 2  # its worker keeps its socket, and its place
            old.ports.of(0)[CLIENTS][0].listen()
            port = old.ports.address[1]
            with pytest.raises(NotReplaced, match=r"host differs: it is '127\.0\.0\.1' there"):
                await asyncio.to_thread(succeed, host="localhost", port=port)
            await asyncio.sleep(0.05)
            with socket.create_server(("127.0.0.1", 0)) as free:
                other = free.getsockname()[1]
            await asyncio.to_thread(succeed, port=other)
        Ports(config(tmp_path, port=port), {}).close()


@on_loop
async def test_a_successor_that_fails_says_whether_the_one_before_goes_on(tmp_path: Path) -> None:
    name = name_of(tmp_path / "gateway.toml")

    async def fails() -> None:
        with ExitStack() as held:
            made = begun(config(tmp_path), name, replaces=True, ready_s=1.0, successor=list)
            await asyncio.to_thread(held.enter_context, made)
            if has_ended:
                old.stop()
            raise NotReplaced("no node is ready")

    async with in_charge(tmp_path) as old:
        for has_ended in (False, True):
            with pytest.raises(NotReplaced, match="no node is ready") as failure:
                await fails()
            assert failure.value.goes_on != has_ended
            await asyncio.sleep(0.05)


@on_loop
async def test_a_successor_that_is_stuck_makes_way_for_another_one(tmp_path: Path) -> None:
    name = name_of(tmp_path / "gateway.toml")
    told = HandoverOffer(pid=os.getpid(), lineage=str(tmp_path), format="1", sockets={})
    door = HandoverDoor(name, lambda: (told, [0]), lambda pid: None, offer_s=0.0)
    door.open()
    stuck, other = await found(name), await found(name)
    with pytest.raises(NotReplaced, match="took too long, and another one was started"):
        await asyncio.to_thread(stuck.leave)
    await asyncio.to_thread(other.leave)
    door.close()
    for each in (stuck, other):
        os.close(each.lock)


@on_loop
async def test_a_worker_that_leaves_waits_for_its_clients_unless_its_parent_has_ended() -> None:
    async with world(remote=0, local=0, decode=1) as w:
        async with w.http.get("/livez") as answer:  # it keeps its connection
            await answer.read()
        async with asyncio.timeout(PATIENCE_S):
            await w.gateway.left(PATIENCE_S, lambda: False)
        assert sum(map(len, w.gateway.gates)) == 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        await w.gateway.left(0.2, lambda: True)
        assert loop.time() - began > 0.1


@on_loop
async def test_a_worker_that_is_started_again_keeps_the_socket_that_another_generation_has_too(tmp_path: Path) -> None:
    name = name_of(tmp_path / "gateway.toml")
    async with in_charge(tmp_path, workers=2) as generation:
        (before,) = generation.ports.of(0)[CLIENTS]
        successor = await found(name)
        generation.renew(0)
        assert generation.ports.of(0) == {CLIENTS: [before]}
        successor.close()
        os.close(successor.lock)
        for each in successor.sockets[CLIENTS]:
            each.close()
        await asyncio.sleep(0.05)
        made = begun(config(tmp_path, workers=2), name, replaces=True, ready_s=1.0, successor=list)
        with ExitStack() as held:
            following = await asyncio.to_thread(held.enter_context, made)
            handed = following.ports.of(0)
            following.renew(0)  # the one before still serves there
            assert following.ports.of(0) == handed
        await asyncio.sleep(0.05)
        generation.renew(0)
        assert before.fileno() == -1


@on_loop
async def test_a_gateway_that_cannot_take_charge_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("no announcement")

    with begun(config(tmp_path), "\0prfaas-test", replaces=False, ready_s=1.0, successor=list) as generation:
        generation.take_charge(lambda: None, fails)
        await until(lambda: "cannot be replaced by another one" in caplog.text)
        generation.stop()
    assert "no announcement" in caplog.text


@on_loop
async def test_a_stuck_successor_that_serves_at_last_hears_that_it_is_too_late(tmp_path: Path) -> None:
    name, left = name_of(tmp_path / "gateway.toml"), list[int]()
    told = HandoverOffer(pid=os.getpid(), lineage=str(tmp_path), format="1", sockets={})
    door = HandoverDoor(name, lambda: (told, [0]), left.append, offer_s=0.0)
    door.open()
    with closing(asked(name)) as stuck, closing(asked(name)) as other:
        stuck.send(b"replace")
        await until(lambda: door.has_offered)
        other.send(b"replace")
        stuck.send(b"serving")  # before it can hear that the other one has asked
        words = [await asyncio.to_thread(stuck.recv, 1 << 16) for _ in range(2)]
        assert (words[1], left) == (b"withdrawn", [])
    door.close()


def asked(name: str) -> socket.socket:
    """A connection to the gateway that has this name."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(name)
    return connection
