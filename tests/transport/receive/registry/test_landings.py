"""The registry behind a listener, in what sockets do not show."""

import tracemalloc
import weakref
from dataclasses import replace

import pytest

from tests.transport.helpers import SECRET
from transport.errors import RemoteProtocolError
from transport.receive.registry.landing import Claim
from transport.receive.registry.landings import Landings
from transport.receive.registry.segments import RemoteSegment, read_id, write_id
from transport.wire.frames import MAX_TRANSFER_BYTES, Abort, Accept, Ack, Code, Nack, Open, Refuse
from transport.wire.manifest import Manifest, proof_of
from transport.wire.sizes import RangeSizes

NONCES = b"n" * 32
MAX_ENDED_BYTES = 4096  # of memory, for each landing that ended


def opening(sizes: list[int], slot: int = 0, transfer_id: str = "t", secret: bytes = SECRET, **more: object) -> Open:
    manifest = Manifest(sizes)
    return Open(
        slot=slot,
        transfer_id=transfer_id,
        proof=proof_of(secret, transfer_id, manifest.digest, NONCES),
        total_bytes=manifest.total_bytes,
        num_ranges=len(sizes),
        manifest_digest=manifest.digest,
        **more,  # type: ignore[arg-type]
    )


def sink_of(size: int) -> memoryview:
    return memoryview(bytearray(size))


def registry(*connections: int, plain_from: frozenset[str] = frozenset(), **limits: int) -> Landings:
    landings = Landings(plain_from=plain_from, **limits)
    for who in connections:
        landings.connected(who)
    return landings


def land(landings: Landings, sizes: list[int], *, who: int = 1, slot: int = 0) -> None:
    """All of it in one chunk."""
    assert isinstance(landings.open(who, opening(sizes, slot), NONCES, 0.0), Accept)
    claim = landings.begin(who, slot, 0, sum(sizes), sink_of, 0.0)
    assert isinstance(claim, Claim)
    assert landings.finish(claim, True, 1.0) == Ack(slot=slot, ranges=((0, sum(sizes)),))


class Endless:
    """Memory that is only as long as it says."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class Owner:
    def on_done(self, _: object) -> None:
        pass


def test_a_landing_that_ended_keeps_neither_its_owner_nor_its_ranges() -> None:
    landings, owner = registry(), Owner()
    gone = weakref.ref(owner)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(20):
            landings.expect(str(i), SECRET, [4096] * 20_000, lambda _: [], on_done=owner.on_done, deadline=1e9)
            landings.cancel(str(i), "", 0.0)
            for landing in landings.take_settled():
                landing.tell_owner()
        del owner, landing
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert gone() is None
    assert (after - before) / 20 < MAX_ENDED_BYTES


def test_a_sender_that_comes_late_hears_how_it_ended() -> None:
    landings = registry(1, 2)
    sizes = [10, 20]
    landings.expect("t", SECRET, sizes, [[sink_of(10)], [sink_of(20)]], on_done=None, deadline=1e9)
    land(landings, sizes)
    assert landings.take_settled()
    assert landings.open(2, opening(sizes, slot=7), NONCES, 2.0) == Accept(slot=7, missing=())
    claim = landings.begin(2, 7, 0, 30, sink_of, 2.0)  # it was on its way already
    assert isinstance(claim, Claim)
    assert landings.finish(claim, True, 2.0) == Ack(slot=7, ranges=((0, 30),))
    assert landings.abort(2, Abort(slot=7, leave=True), 2.0) == []
    assert landings.open(2, opening(sizes, slot=8, secret=b"guess"), NONCES, 2.0) == Refuse(slot=8, code="bad_secret")
    assert landings.open(2, opening([30], slot=8), NONCES, 2.0) == Refuse(slot=8, code="manifest_mismatch")
    assert landings.counters["landed"] == 1


def test_a_landing_that_failed_stays_failed_until_it_is_expected_again() -> None:
    landings = registry(1)
    landings.expect("t", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=1e9)
    landings.cancel("t", "gone", 0.0)
    assert landings.open(1, opening([10]), NONCES, 0.0) == Refuse(slot=0, code="cancelled", detail="gone")
    landings.expect("t", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=1e9)
    assert landings.open(1, opening([10]), NONCES, 0.0) == Accept(slot=0, missing=((0, 10),))


def test_a_slot_that_is_open_is_not_opened_again() -> None:
    landings = registry(1)
    first = landings.expect("t", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=1e9)
    landings.expect("u", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=1e9)
    landings.open(1, opening([10]), NONCES, 0.0)
    with pytest.raises(RemoteProtocolError, match="again"):
        landings.open(1, opening([10], transfer_id="u"), NONCES, 0.0)
    landings.abort(1, Abort(slot=0, leave=True), 0.0)
    assert isinstance(landings.open(1, opening([10], transfer_id="u"), NONCES, 0.0), Accept)
    assert not first.senders


def test_one_write_too_many_is_named_as_such() -> None:
    landings = registry(1, max_active=1)
    landings.segments.register("kv", RemoteSegment(memoryview(bytearray(100)), SECRET))
    for slot, answer in enumerate((Accept(slot=0, missing=((0, 10),)), Refuse(slot=1, code="too_many_landings"))):
        frame = opening([10], slot, write_id("kv", str(slot)), placement=((0, 10),))
        assert landings.open(1, frame, NONCES, 0.0) == answer


def test_a_late_chunk_of_a_landing_that_ended_does_not_end_the_next_of_its_name() -> None:
    landings = registry(1, 2)
    landings.expect("t", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=1e9)
    assert isinstance(landings.open(2, opening([10]), NONCES, 0.0), Accept)
    land(landings, [10])
    again = landings.expect("t", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=5.0)
    late = landings.begin(2, 0, 0, 10, sink_of, 1.0)
    assert isinstance(late, Claim)
    landings.finish(late, True, 1.0)
    assert again.outcome is None
    landings.expire(6.0)
    assert again.outcome is not None


def test_every_slot_of_a_landing_hears_that_it_is_over() -> None:
    landings = registry(1, 2)
    landings.expect("t", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=1e9)
    for who, slot in ((1, 0), (1, 1), (2, 0), (2, 5)):
        landings.open(who, opening([10], slot), NONCES, 0.0)
    told = landings.abort(2, Abort(slot=5, leave=False), 1.0)
    assert [(who, cancel.slot) for who, cancel in told] == [(1, 0), (1, 1), (2, 0)]


def test_a_coded_chunk_that_comes_again_and_is_damaged_is_answered_so_that_it_leaves_once_more() -> None:
    landings = registry(1, 2)
    landings.expect("t", SECRET, [10], [[sink_of(10)]], on_done=None, deadline=1e9)
    assert isinstance(landings.open(2, opening([10]), NONCES, 0.0), Accept)
    land(landings, [10])
    assert landings.reject(2, 0, 0, 10, Code.CODEC) == Nack(slot=0, offset=0, length=10, code=Code.CODEC)


@pytest.mark.parametrize(
    "spoilt",
    [{"manifest_digest": Manifest([9]).digest}, {"num_ranges": 2}, {"total_bytes": 11}],
    ids=lambda x: next(iter(x)),
)
def test_a_write_whose_manifest_does_not_fit_its_placement_is_never_registered(spoilt: dict[str, object]) -> None:
    landings = registry(1)
    landings.segments.register("kv", RemoteSegment(memoryview(bytearray(100)), SECRET))
    name = write_id("kv", "1")
    frame = replace(opening([10], 0, name, placement=((0, 10),)), **spoilt)  # type: ignore[arg-type]
    frame = replace(frame, proof=proof_of(SECRET, name, frame.manifest_digest, NONCES))
    assert landings.open(1, frame, NONCES, 0.0) == Refuse(slot=0, code="manifest_mismatch")
    assert landings.active_ids() == []
    assert landings.next_deadline() == float("inf")
    assert isinstance(landings.open(1, opening([10], 0, name, placement=((0, 10),)), NONCES, 0.0), Accept)


def test_the_digest_of_many_ranges_is_not_computed_before_somebody_opens_them() -> None:
    landings = registry(1)
    sizes = RangeSizes([(8, 100_000)])
    landings.expect("t", SECRET, sizes, lambda _: [sink_of(8)], on_done=None, deadline=1e9)
    assert landings.cancel("t", "", 0.0) == []
    assert "digest" not in vars(sizes)
    reply = landings.open(1, opening([8] * 100_000), NONCES, 0.0)
    assert reply == Refuse(slot=0, code="cancelled")
    assert "digest" in vars(sizes)
    assert landings.open(1, opening([8] * 99_999 + [9]), NONCES, 0.0) == Refuse(slot=0, code="manifest_mismatch")


def test_reads_and_writes_of_more_bytes_than_any_transfer_has_are_refused() -> None:
    landings, many = registry(1), 10
    landings.segments.register("kv", RemoteSegment(Endless(MAX_TRANSFER_BYTES // 5), SECRET, readable=True))  # type: ignore[arg-type]
    placement = ((0, MAX_TRANSFER_BYTES // many * 2),) * many
    for slot, name in enumerate((write_id("kv", "1"), read_id("kv", "1", "host:7"))):
        frame = replace(opening([10], slot, name), placement=placement)
        assert landings.open(1, frame, NONCES, 0.0) == Refuse(slot=slot, code="out_of_bounds")


def test_one_read_too_many_is_named_as_such() -> None:
    landings = registry(1, max_reads=1)
    landings.segments.register("kv", RemoteSegment(memoryview(bytearray(100)), SECRET, readable=True))
    answers = (Accept(slot=0, missing=()), Refuse(slot=1, code="too_many_reads"), Accept(slot=2, missing=()))
    for name, (slot, answer) in zip("121", enumerate(answers), strict=True):  # the last one asks again for the first
        frame = opening([10], slot, read_id("kv", name, "host:7"), placement=((0, 10),))
        assert landings.open(1, frame, NONCES, 0.0) == answer


def test_a_late_sender_in_clear_hears_that_all_has_landed_if_it_might_have_sent_it() -> None:
    landings = registry(1, 2, 3, plain_from=frozenset({"fabric"}))
    landings.places[3] = "east/p0"
    for transfer_id, sender in (("t", "fabric/p0"), ("u", "east/p0")):
        landings.expect(transfer_id, SECRET, [], lambda _: [], on_done=None, deadline=1e9, sender=sender)
    complete = Accept(slot=0, missing=())
    assert landings.open(1, opening([]), NONCES, 0.0) == landings.open(2, opening([]), NONCES, 0.0) == complete
    refused = Refuse(slot=1, code=Code.ACCESS)
    for _ in range(2):  # the second time it has ended
        assert landings.open(2, opening([], 1, "u"), NONCES, 0.0) == refused
        assert landings.open(3, opening([], 0, "u"), NONCES, 0.0) == complete
        landings.abort(3, Abort(slot=0, leave=True), 0.0)
