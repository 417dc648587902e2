"""The sans-IO pair: both real ends, virtual time, and a wire that misbehaves."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties import examples
from tests.transport.helpers import SECRET, Memory
from transport.loopback import Loopback
from transport.receive.registry.landing import LandingResult
from transport.wire.outcome import MAX_REJECTED_CHUNKS

SIZES = [70_000, 0, 20_480, 1, 300_000, 5_000]


def run(
    link: Loopback, sizes: list[int] = SIZES, *, secret: bytes = SECRET
) -> tuple[Memory, Memory, list[LandingResult]]:
    source, target = Memory(sizes, fill=True, seed=1), Memory(sizes, seed=2)
    results: list[LandingResult] = []
    link.expect("t", SECRET, sizes, target, on_done=results.append)
    transfer = link.open("t", secret, sizes, source)
    link.ready(transfer, range(len(sizes)))
    link.run(until=600.0, stop=lambda: bool(results) and transfer.outcome is not None)
    return source, target, results


def test_bytes_arrive() -> None:
    source, target, results = run(Loopback())
    assert source.content() == target.content()
    assert results[0].ok
    assert results[0].bytes_landed == sum(SIZES)


def test_link_rate_and_latency_show_in_virtual_time() -> None:
    link = Loopback(bytes_per_s=1e6, latency_s=0.05)
    run(link, [1_000_000])
    assert link.now == pytest.approx(1.0 + 0.05 + 3 * 0.1, rel=0.2)


def test_eager_bytes_save_the_round_trip_of_the_answer() -> None:
    spent = {}
    for eager_bytes in (0, 200_000):
        link = Loopback(bytes_per_s=1e6, latency_s=0.05, eager_bytes=eager_bytes)
        source, target, results = run(link, [1_000_000])
        spent[eager_bytes] = link.now
        assert source.content() == target.content()
        assert results[0].ok
    assert spent[0] - spent[200_000] == pytest.approx(0.1, rel=0.1)


def test_eager_bytes_of_a_sender_with_the_wrong_secret_are_read_past() -> None:
    link = Loopback(eager_bytes=100_000)
    source, target = Memory(SIZES, fill=True), Memory(SIZES)
    landing = link.expect("t", SECRET, SIZES, target)
    wrong = link.open("t", b"guess", SIZES, source)
    link.ready(wrong, range(len(SIZES)))
    link.run(until=1.0)
    assert wrong.outcome is not None
    assert wrong.outcome.code == "bad_secret"
    assert wrong.outbox.bytes_sent > 0
    assert landing.bytes_landed == 0
    assert link.scheduler.bytes_in_flight == 0
    right = link.open("t", SECRET, SIZES, source)
    link.ready(right, range(len(SIZES)))
    link.run(until=2.0)
    assert source.content() == target.content()
    assert link.errors == []


def test_an_empty_transfer_lands_at_once() -> None:
    _, _, results = run(Loopback(), [])
    assert results[0].ok


def test_the_wrong_secret_is_refused_and_counted() -> None:
    link = Loopback()
    source, target = Memory(SIZES, fill=True), Memory(SIZES)
    landing = link.expect("t", SECRET, SIZES, target)
    transfer = link.open("t", b"guess", SIZES, source)
    link.ready(transfer, range(len(SIZES)))
    link.run(until=1.0)
    assert transfer.outcome is not None
    assert transfer.outcome.code == "bad_secret"
    assert link.landings.counters["refused:bad_secret"] == 1
    assert landing.bytes_landed == 0


def test_chunks_that_are_never_authentic_end_their_landing() -> None:
    link = Loopback(num_lanes=1)
    landing = link.expect("t", SECRET, SIZES, Memory(SIZES))
    transfer = link.open("t", SECRET, SIZES, Memory(SIZES))
    link.run(until=1.0)
    for _ in range(MAX_REJECTED_CHUNKS):
        assert not link.landings.break_seal(0, transfer.slot, link.now)
    assert [frame.code for _, frame in link.landings.break_seal(0, transfer.slot, link.now)] == ["seal"]
    assert landing.outcome is not None
    assert link.landings.counters["failed:seal"] == 1


def test_a_second_sender_sends_only_what_is_missing() -> None:
    link = Loopback(chunk_bytes=10_000)
    source, target = Memory(SIZES, fill=True), Memory(SIZES)
    landing = link.expect("t", SECRET, SIZES, target)
    first = link.open("t", SECRET, SIZES, source)
    link.ready(first, [0, 2])
    link.run(until=1.0)
    link.abort(first, leave=True)
    second = link.open("t", SECRET, SIZES, source)
    link.ready(second, range(len(SIZES)))
    link.run(until=2.0)
    assert second.outcome is not None
    assert second.outcome.ok
    assert second.outbox.bytes_resumed == 90_480
    assert second.outbox.bytes_sent == sum(SIZES) - 90_480
    assert landing.outcome is not None
    assert landing.outcome.ok
    assert source.content() == target.content()


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_the_other_end_hears_of_the_end(by: str) -> None:
    link = Loopback()
    landing = link.expect("t", SECRET, SIZES, Memory(SIZES))
    transfer = link.open("t", SECRET, SIZES, Memory(SIZES))
    link.run(until=1.0)
    if by == "sender":
        link.abort(transfer)
    else:
        link.cancel("t")
    link.run(until=2.0)
    assert transfer.outcome is not None
    assert landing.outcome is not None
    assert transfer.outcome.code == landing.outcome.code == ("aborted" if by == "sender" else "cancelled")


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_transfers_that_are_given_up_leave_the_window_free(by: str) -> None:
    link = Loopback(num_lanes=1, bytes_per_s=1e7, latency_s=0.02)
    link.scheduler.window_bytes = 256 << 10
    for n in range(8):
        link.expect(str(n), SECRET, [1 << 20], Memory([1 << 20]))
        transfer = link.open(str(n), SECRET, [1 << 20], Memory([1 << 20]))
        link.ready(transfer, [0])
        link.run(until=link.now + 0.09)
        assert link.scheduler.bytes_in_flight
        if by == "sender":
            link.abort(transfer)
        else:
            link.cancel(str(n))
        link.run(until=link.now + 1.0)
        assert transfer.outbox.rejected_chunks == 0
        assert link.scheduler.bytes_in_flight == 0
    assert run(link)[2][0].ok


def test_a_landing_without_senders_is_given_up() -> None:
    link = Loopback(num_lanes=1, reconnect_s=1000.0)
    results: list[LandingResult] = []
    link.expect("t", SECRET, SIZES, Memory(SIZES), on_done=results.append, orphan_timeout_s=3.0)
    link.open("t", SECRET, SIZES, Memory(SIZES))
    link.run(until=1.0)
    link.cut(0)
    link.run(until=3.9)
    assert not results
    link.run(until=1000.5)
    assert [result.reason for result in results] == ["sender_lost"]


class Trouble:
    """A wire that splits, loses, repeats, swaps, truncates and flips what passes, for its first `budget` incidents."""

    def __init__(self, seed: int, budget: int, kinds: list[str]) -> None:
        self._rng = np.random.default_rng(seed)
        self._budget = budget
        self._kinds = kinds
        self._held: dict[int, bytes] = {}
        self._deaf: set[int] = set()  # a stream that was truncated carries nothing more

    def __call__(self, lane: int, data: bytes) -> Iterator[bytes]:
        if lane in self._deaf:
            return
        if lane in self._held:
            yield data
            yield self._held.pop(lane)
            return
        if not self._budget or self._rng.random() > 0.2:
            yield data
            return
        self._budget -= 1
        kind = str(self._rng.choice(self._kinds))
        if kind == "swap":
            self._held[lane] = data
            return
        if kind == "truncate":
            self._deaf.add(lane)
        yield from getattr(self, "_" + kind)(data)

    def _split(self, data: bytes) -> Iterator[bytes]:
        at = int(self._rng.integers(0, len(data)))
        yield data[:at]
        yield data[at:]

    def _lose(self, data: bytes) -> Iterator[bytes]:
        yield from ()

    def _repeat(self, data: bytes) -> Iterator[bytes]:
        yield data
        yield data

    def _truncate(self, data: bytes) -> Iterator[bytes]:
        yield data[: int(self._rng.integers(0, len(data)))]

    def _flip(self, data: bytes) -> Iterator[bytes]:
        at = int(self._rng.integers(0, len(data)))
        yield data[:at] + bytes([data[at] ^ (1 << int(self._rng.integers(0, 8)))]) + data[at + 1 :]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.sets(st.sampled_from(["split", "lose", "repeat", "swap", "truncate"]), min_size=1),
    st.sampled_from([0, 100_000]),
)
def test_every_byte_is_right_whatever_the_wire_does(
    seed: int, num_lanes: int, kinds: set[str], eager_bytes: int
) -> None:
    forth, back = Trouble(seed, 12, sorted(kinds)), Trouble(seed + 1, 6, sorted(kinds))
    link = Loopback(num_lanes=num_lanes, chunk_bytes=16_384, eager_bytes=eager_bytes, to_receiver=forth, to_sender=back)
    source, target, results = run(link)
    assert [result.ok for result in results] == [True]
    assert source.content() == target.content()


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32))
def test_flipped_payload_bits_are_never_taken_for_data(seed: int) -> None:
    """Flips in headers may end the transfer, too; what must not happen is a landing that is complete and wrong."""
    link = Loopback(num_lanes=2, chunk_bytes=16_384, to_receiver=Trouble(seed, 8, ["flip"]))
    source, target, results = run(link)
    if results and results[0].ok:
        assert source.content() == target.content()


def test_byte_at_a_time() -> None:
    def one_by_one(_: int, data: bytes) -> Iterator[bytes]:
        return (data[i : i + 1] for i in range(len(data)))

    sizes = [3_000, 20, 1_500]
    source, target, results = run(Loopback(chunk_bytes=700, to_receiver=one_by_one, to_sender=one_by_one), sizes)
    assert results[0].ok
    assert source.content() == target.content()


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0, 100_000]))
def test_connections_that_die_at_random_cost_no_byte(seed: int, eager_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    link = Loopback(num_lanes=3, chunk_bytes=8_192, bytes_per_s=1e7, latency_s=0.002, eager_bytes=eager_bytes)
    for when in np.cumsum(rng.exponential(0.01, size=12)):
        link.at(float(when), lambda: link.cut(int(rng.choice(list(link.lanes)))) if link.lanes else None)
    source, target, results = run(link)
    assert [result.ok for result in results] == [True]
    assert source.content() == target.content()
