"""Who may read from a listener: no ticket and no address takes all of it, and who only waits makes room."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.transport.helpers import SECRET, Memory, deliver
from tests.transport.raw_sender import RawSender
from transport.errors import ConnectionRefused
from transport.receive.options import ServerOptions
from transport.receive.registry.landings import MAX_SLOTS_OF_TRANSFER
from transport.receive.registry.seats import IDLE_S, Crowded, Origin, Seated, Seats
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.wire.frames import Accept, Ping

BUSY = float("inf")
SEATS = 16


def of(address: str, transfer_id: str = "") -> Origin:
    return Origin(address, transfer_id or address)


def busy(who: int) -> float:
    return BUSY


def test_one_transfer_lets_in_a_quarter_and_another_one_still_gets_in() -> None:
    seats = Seats(SEATS)
    taken = [seats.take(who, of(f"a{who}", "t"), busy) for who in range(SEATS)]
    assert taken == [Seated()] * 4 + [Crowded("transfer")] * 12
    assert seats.take(100, of("a", "honest"), busy) == Seated()


def test_one_address_takes_a_half() -> None:
    seats = Seats(SEATS)
    taken = [seats.take(who, of("a", f"t{who}"), busy) for who in range(SEATS)]
    assert taken == [Seated()] * 8 + [Crowded("address")] * 8
    assert seats.take(100, of("b"), busy) == Seated()


def test_the_longest_idle_one_makes_room_and_busy_ones_never_do() -> None:
    seats = Seats(SEATS)
    for who in range(SEATS):
        assert seats.take(who, of(f"a{who}"), busy) == Seated()
    assert seats.is_full(busy)
    idle = {3: 7.0, 5: 6.0}
    assert not seats.is_full(lambda who: idle.get(who, BUSY))
    assert seats.take(100, of("b"), lambda who: idle.get(who, BUSY)) == Seated(instead_of=(5,))
    assert seats.take(101, of("c"), lambda who: idle.get(who, BUSY)) == Seated(instead_of=(3,))
    assert seats.take(102, of("d"), lambda who: idle.get(who, BUSY)) == Crowded("all")
    assert len(seats) == SEATS


def test_a_ticket_that_has_its_share_displaces_only_its_own() -> None:
    seats = Seats(SEATS)
    for who in range(4):
        seats.take(who, of(f"a{who}", "t"), busy)
    seats.take(50, of("honest"), busy)
    idle = {50: 1.0, 2: 9.0}  # the honest one has been idle for longer
    assert seats.take(100, of("z", "t"), lambda who: idle.get(who, BUSY)) == Seated(instead_of=(2,))


def test_limits_that_are_reached_at_once_each_give_up_one_of_their_own() -> None:
    seats = Seats(SEATS)
    for who in range(4):  # the ticket's part, from elsewhere
        seats.take(who, of(f"a{who}", "t"), busy)
    for who in range(10, 18):  # the address's part, for other tickets
        seats.take(who, of("b", f"t{who}"), busy)
    idle = {2: 1.0, 11: 1.0}
    assert seats.take(100, of("b", "t"), lambda who: idle.get(who, BUSY)) == Seated(instead_of=(2, 11))
    assert seats.take(101, of("z", "t"), busy) == Crowded("transfer")
    assert seats.take(102, of("b", "y"), busy) == Crowded("address")


def test_one_that_both_limits_could_give_up_is_enough() -> None:
    seats = Seats(SEATS)
    for who in range(4):
        seats.take(who, of("b", "t"), busy)
    for who in range(10, 14):
        seats.take(who, of("b", f"t{who}"), busy)
    idle = {2: 1.0, 11: 0.5}
    assert seats.take(100, of("b", "t"), lambda who: idle.get(who, BUSY)) == Seated(instead_of=(2,))
    assert len(seats) == SEATS // 2


def test_who_is_idle_for_too_long_goes_however_much_room_there_is() -> None:
    seats = Seats(SEATS)
    seats.take(1, of("a"), busy)
    seats.take(2, of("b"), busy)
    assert seats.overdue(lambda who: 100.0 if who == 1 else BUSY, 100.0 + IDLE_S) == [1]
    assert seats.overdue(lambda who: 100.0, 99.0 + IDLE_S) == []
    assert len(seats) == 1


def test_seats_are_free_again_when_their_connections_leave() -> None:
    seats = Seats(2)
    for who in range(20):
        assert seats.take(who, of("a", "t"), busy) == Seated()
        seats.leave(who)


# A real listener


@pytest.fixture
def server() -> Iterator[TransferServer]:
    with TransferServer(options=ServerOptions(max_connections=SEATS)) as server:
        yield server


def opened(server: TransferServer, transfer_id: str) -> RawSender | None:
    """A connection that has opened it; None: it was turned away."""
    sender = RawSender.to(server.address)
    sender.say(sender.opening(0, transfer_id, [10]))
    try:
        sender.hear(Accept)
    except (ConnectionRefused, EOFError, OSError):
        sender.sock.close()
        return None
    return sender


@pytest.mark.parametrize("is_over", [False, True])
def test_an_honest_sender_gets_in_beside_one_ticket_on_every_connection(server: TransferServer, is_over: bool) -> None:
    server.expect("t", SECRET, [10], Memory([10]))
    with ExitStack() as stack:
        held = [stack.enter_context(sender) for _ in range(SEATS) if (sender := opened(server, "t")) is not None]
        assert len(held) == SEATS // 4
        assert server.counters["crowded:transfer"] == SEATS - len(held)
        if is_over:
            server.cancel("t", "over")
        with TransferClient(options=ClientOptions(connections=4)) as client:
            pushed, landed = deliver(server, client, [1000], transfer_id="honest").wait()
            assert pushed is not None
            assert landed is not None
            assert pushed.ok
            assert landed.ok


def test_those_of_a_transfer_that_is_over_make_room_though_they_ping(server: TransferServer) -> None:
    with ExitStack() as stack:
        held: list[RawSender] = []
        for number in range(SEATS // 2):  # as many as one address may have
            server.expect(f"t{number}", SECRET, [10], Memory([10]))
            sender = opened(server, f"t{number}")
            assert sender is not None
            held.append(stack.enter_context(sender))
        for number in range(SEATS // 2):
            server.cancel(f"t{number}", "over")
        for sender in held:
            sender.say(Ping(token=1))
        with TransferClient(options=ClientOptions(connections=1)) as client:
            pushed, _ = deliver(server, client, [1000], transfer_id="honest").wait()
            assert pushed is not None
            assert pushed.ok
        assert server.counters["turned_away:idle"] >= 1


def test_a_connection_has_few_slots_for_one_transfer(server: TransferServer) -> None:
    server.expect("t", SECRET, [10], Memory([10]))
    with RawSender.to(server.address) as sender:
        for slot in range(MAX_SLOTS_OF_TRANSFER):
            sender.say(sender.opening(slot, "t", [10]))
            sender.hear(Accept)
        sender.say(sender.opening(MAX_SLOTS_OF_TRANSFER, "t", [10]))
        with pytest.raises((ConnectionRefused, EOFError)):
            sender.hear(Accept)
