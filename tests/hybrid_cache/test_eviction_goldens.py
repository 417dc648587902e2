"""Policies against the counts of other implementations, on a real trace."""

import json
from pathlib import Path

import pytest

from benchmarks.cache.replay import categorised, flat_replays, prefix_replays
from benchmarks.cache.traces import RecordedTrace, read_trace
from benchmarks.eviction.choice import COMPARED
from benchmarks.eviction.pools import ChainPool, FlatPool
from hybrid_cache.eviction.base import Use
from hybrid_cache.eviction.workload import WorkloadAware, fit_offline

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = json.loads((FIXTURES / "golden_mooncake_synthetic.json").read_text())


@pytest.fixture(scope="module")
def trace() -> RecordedTrace:
    return read_trace(FIXTURES / "mooncake_synthetic.jsonl.xz")


def test_trace(trace):
    assert trace.block_size == 512
    assert trace.blocks == GOLDEN["flat"]["fwd"]["accesses"]
    assert trace.footprint == GOLDEN["flat"]["fwd"]["unique"]


@pytest.mark.rotating
@pytest.mark.parametrize("label", GOLDEN["flat"]["fwd"]["caps"])
@pytest.mark.parametrize("name", ["FIFO", "LRU", "LFU", "SIEVE", "Belady"])
def test_block_hits_are_equal(trace, name, label):
    golden = GOLDEN["flat"]["fwd"]
    counts = flat_replays()[name.lower()](trace, golden["caps"][label])
    assert sum(counts.hits) == golden["hits"][name][label]


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "tolerance"), [("ARC", 0.006), ("GDSF", 0.006)])
@pytest.mark.parametrize("label", ["1%", "10%"])
def test_block_hits_are_close(trace, name, label, tolerance):
    golden = GOLDEN["flat"]["fwd"]
    counts = flat_replays()[name.lower()](trace, golden["caps"][label])
    assert abs(sum(counts.hits) - golden["hits"][name][label]) <= tolerance * golden["accesses"]


@pytest.mark.parametrize("name", ["FIFO", "LRU", "LFU", "SIEVE"])
def test_block_hits_backwards(trace, name):
    golden = GOLDEN["flat"]["rev"]
    capacity = golden["caps"]["5%"]
    pool = FlatPool(capacity, COMPARED[name.lower()](capacity))
    hits = sum(pool.access(key, row.now) for row in trace.rows for key in reversed(row.path))
    assert hits == golden["hits"][name]["5%"]


def prefix_hits_after_warm_up(trace: RecordedTrace, hits) -> int:
    half = trace.rows[-1].now / 2
    return sum(count for row, count in zip(trace.rows, hits, strict=True) if row.now >= half)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["LRU", "FIFO", "S3FIFO", "ARC"])
@pytest.mark.parametrize("capacity", ["323", "9704"])
def test_prefix_hits_are_equal(trace, name, capacity):
    counts = prefix_replays()[name.lower()](trace, int(capacity))
    assert prefix_hits_after_warm_up(trace, counts.hits) == GOLDEN["prefix"][capacity][name][0]


def workload_aware(trace: RecordedTrace, name: str) -> WorkloadAware:
    half = trace.rows[-1].now / 2
    fits = None if name.endswith("online") else fit_offline(use for use in categorised(trace) if use.now < half)
    return WorkloadAware(fits=fits, conditional="cond" in name)


# Priorities are floating-point numbers: ties may fall differently. Our chains also pin the blocks of the running request.
@pytest.mark.parametrize(
    ("name", "tolerance"), [("WA-joint-60", 0.0005), ("WA-cond-60-online", 0.0005), ("WAL-cond-60-online", 0.001)]
)
def test_workload_aware_hits(trace, name, tolerance):
    golden = GOLDEN["prefix"]["1617"][name]
    make = ChainPool if name.startswith("WAL") else FlatPool
    pool = make(1617, workload_aware(trace, name))
    hits = [pool.request(use) for use in categorised(trace)]
    assert abs(prefix_hits_after_warm_up(trace, hits) - golden[0]) <= tolerance * golden[1]


def test_one_category_is_lru(trace):
    aware, lru = FlatPool(1617, WorkloadAware(conditional=True)), FlatPool(1617, COMPARED["lru"](1617))
    for row in trace.rows:
        assert aware.request(Use(row.now, row.path)) == lru.request(Use(row.now, row.path))


@pytest.mark.rotating
@pytest.mark.dimensions(share=None)
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_default_beats_the_classics(trace, share):
    capacity = round(trace.footprint * share)
    replays = prefix_replays()
    best = max(sum(replays[name](trace, capacity).hits) for name in ["lru", "lfu", "s3fifo", "sieve", "gdsf", "arc"])
    ours = sum(replays["default"](trace, capacity).hits)
    bound = sum(replays["belady"](trace, capacity).hits)
    assert best + 0.005 * trace.blocks < ours <= bound


@pytest.mark.rotating
def test_a_cache_that_has_just_started_is_not_behind_lru(trace):
    """Half a trace, from an empty cache: what is known of young blocks alone must not keep new ones out."""
    half = trace.half(2)
    capacity = round(half.footprint * 0.05)
    replays = prefix_replays()
    assert sum(replays["default"](half, capacity).hits) > sum(replays["lru"](half, capacity).hits)
