"""Usage in the registry: what is written is read again, within bounds; what cannot be is named."""

import random
import zlib
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.counts import OTHER, Counts
from gateway.fleet.usage.documents import (
    MAX_BYTES,
    MAX_TEXT_BYTES,
    FoldedUsage,
    RunUsage,
    folded_read,
    folded_written,
    run_read,
    run_written,
)
from gateway.fleet.usage.keeper import CYCLE_S, pause_s
from tests.gateway.fleet.usage.test_counts import COUNTS

RUN = RunUsage(gateway="g0", since_unix_s=5, number=3, counts={}, has_ended=True)


def names(count: int) -> list[str]:
    """Tenants whose names no packing makes shorter."""
    rng = random.Random(7)
    return [rng.randbytes(48).hex()[:64] for _ in range(count)]


@given(COUNTS)
def test_what_is_written_is_read(counts: Counts) -> None:
    run = replace(RUN, counts=counts)
    assert run_read("a", run_written(run)) == run
    folded = FoldedUsage(since_unix_s=5, folded={"a": 3}, counts=counts)
    data, is_whole = folded_written(folded)
    assert is_whole
    assert folded_read(data) == folded


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        zlib.compress(b"{}"),
        zlib.compress(b"\xff"),
        run_written(RUN)[:-4],
        zlib.compress(b'{"gateway":"g","since_unix_s":-1,"number":1,"accounts":[]}'),
        zlib.compress(b'{"gateway":"g","since_unix_s":1,"number":1,"accounts":[{"tenant":"a","prompt_tokens":-1}]}'),
        zlib.compress(b" " * (MAX_TEXT_BYTES + 1)),
        bytes(MAX_BYTES + 1),
    ],
)
def test_what_cannot_be_is_named(data: bytes) -> None:
    with pytest.raises(FleetFailed, match="broken") as failed:
        run_read("broken", data)
    assert failed.value.reason == "malformed"
    with pytest.raises(FleetFailed):
        folded_read(data)


def test_later_versions_may_say_more() -> None:
    more = msgspec.json.decode(zlib.decompress(run_written(RUN))) | {"more": [1]}
    assert run_read("a", zlib.compress(msgspec.json.encode(more))) == RUN


def test_a_sum_that_grows_too_long_has_fewer_tenants() -> None:
    counts = {
        (name, what, "", ""): number
        for number, name in enumerate(names(24_000), 1)
        for what in ("requests_200", "prompt_tokens", "completion_tokens")
    }
    data, is_whole = folded_written(FoldedUsage(since_unix_s=5, counts=counts))
    assert len(data) <= MAX_BYTES
    assert not is_whole
    kept = folded_read(data).counts
    assert sum(kept.values()) == sum(counts.values())
    largest = max(counts, key=lambda series: counts[series])
    assert kept[largest] == counts[largest]
    assert (OTHER, "requests_200", "", "") in kept


def test_a_sum_that_deflates_well_can_still_be_read() -> None:
    parts = ("requests_200", "prompt_tokens", "cached_tokens", "completion_tokens")
    counts = {(f"tenant-{number:06}", what, "", ""): 1 for number in range(150_000) for what in parts}
    data, is_whole = folded_written(FoldedUsage(since_unix_s=5, counts=counts))
    assert not is_whole
    assert sum(folded_read(data).counts.values()) == len(counts)
    with pytest.raises(FleetFailed, match="takes") as failed:
        run_written(replace(RUN, counts=counts))
    assert failed.value.reason == "too_long"


def test_a_thousand_tenants_fit_in_a_write_of_five_seconds() -> None:
    rng = random.Random(7)
    plain = ("requests_200", "requests_429", "requests_499", "prompt_tokens", "cached_tokens", "completion_tokens")
    series = [(what, "", "") for what in plain]
    series += [
        ("kv_bytes_request", "east", "west"),
        ("kv_bytes_request", "west", "east"),
        ("kv_bytes_move", "east", "west"),
    ]
    counts = {(f"tenant-{n:04}", *each): rng.randrange(1, 10**10) for n in range(1000) for each in series}
    data = run_written(replace(RUN, counts=counts))
    assert len(data) < 90_000
    assert pause_s(4 * len(data), len(data)) < CYCLE_S + 1.0


def test_a_run_that_is_too_long_is_refused() -> None:
    counts = {(name, "requests_200", "", ""): 1 for name in names(40_000)}
    with pytest.raises(FleetFailed, match="takes") as failed:
        run_written(replace(RUN, counts=counts))
    assert failed.value.reason == "too_long"
