"""The benchmark's command line, on a slice of a real trace."""

import json
import lzma
from pathlib import Path

import pytest

from benchmarks.cache.bound import bound
from benchmarks.cache.bound import main as bound_main
from benchmarks.cache.policies import main
from benchmarks.cache.replay import prefix_replays
from benchmarks.cache.traces import read_trace

TRACE = Path(__file__).parent / "fixtures" / "mooncake_synthetic.jsonl.xz"


@pytest.fixture
def short_trace(tmp_path) -> Path:
    path = tmp_path / "short.jsonl"
    with lzma.open(TRACE, "rt") as lines:
        path.write_text("".join(line for line, _ in zip(lines, range(150), strict=False)))
    return path


def output(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_flat(capsys):
    assert main(["--trace", str(TRACE), "--capacity-blocks", "323", "--policy", "lru", "--json"]) == 0
    (result,) = output(capsys)
    assert list(result) == [
        "policy",
        "capacity_blocks",
        "lookups",
        "hits",
        "hit_ratio",
        "seconds",
        "evictions_per_s",
    ]
    assert (result["hits"], result["lookups"]) == (484, 47171)


@pytest.mark.parametrize("flag", [[], ["--prefix"]])
def test_every_policy_runs_and_none_beats_the_optimum(short_trace, capsys, flag):
    assert main(["--trace", str(short_trace), "--capacity-frac", "0.2", "--json", *flag]) == 0
    hits = {result["policy"]: result["hits"] for result in output(capsys)}
    assert {"default", "lru", "fifo", "lfu", "gdsf", "sieve", "s3fifo", "arc", "wa", "belady"} <= set(hits)
    assert max(hits, key=lambda name: (hits[name], name == "belady")) == "belady"


def test_margin_over_the_best_classic(capsys):
    arguments = ["--trace", str(TRACE), "--prefix", "--capacity-blocks", "323", "--json"]
    assert main([*arguments, "--margin"]) == 0
    (lead,) = output(capsys)
    assert main([*arguments, "--policy", "default", "--policy", lead["best_classic"]]) == 0
    ours, best = output(capsys)
    assert lead["capacity_blocks"] == 323
    assert lead["margin_points"] == pytest.approx(100 * (ours["hit_ratio"] - best["hit_ratio"]), abs=0.005)


def test_halves_stand_alone(short_trace, capsys):
    whole = read_trace(short_trace)
    first, second = whole.half(1), whole.half(2)
    assert [row.path for row in (*first.rows, *second.rows)] == [row.path for row in whole.rows]
    assert second.rows[0].now == 0
    arguments = ["--trace", str(short_trace), "--prefix", "--half", "2", "--capacity-frac", "0.1", "--policy", "lru"]
    assert main([*arguments, "--json"]) == 0
    (result,) = output(capsys)
    assert (result["lookups"], result["capacity_blocks"]) == (second.blocks, round(second.footprint * 0.1))


def test_hybrid(short_trace, capsys):
    assert main(["--trace", str(short_trace), "--hybrid", "--pool-gb", "20", "--json"]) == 0
    systems = {result["policy"].split()[0] for result in output(capsys)}
    assert systems == {"vllm-align", "sglang", "marconi", "ours"}


def test_formats(short_trace, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    packed = tmp_path / "short.jsonl.zst"
    packed.write_bytes(zstandard.ZstdCompressor().compress(short_trace.read_bytes()))
    assert read_trace(packed).rows == read_trace(short_trace).rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "magic"], "unknown policy 'magic'"),
        (["--capacity-blocks", "0"], "at least one block"),
    ],
)
def test_mistakes(short_trace, capsys, arguments, message):
    assert main(["--trace", str(short_trace), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_trace_without_prefixes(tmp_path, capsys):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n')
    assert main(["--trace", str(path)]) == 2
    assert "no hash_ids" in capsys.readouterr().err


def test_bound_lies_between_the_default_and_an_infinite_cache():
    trace = read_trace(TRACE)
    default = prefix_replays()["default"]
    bounds = [bound(trace, capacity) for capacity in (323, 1617, trace.footprint)]
    hits = [sum(default(trace, capacity).hits) / trace.blocks for capacity in (323, 1617)]
    assert bounds == sorted(bounds)
    assert all(ours <= best for ours, best in zip(hits, bounds[:2], strict=True))
    assert bounds[-1] == pytest.approx(0.3142, abs=1e-4)


def test_bound_command(capsys):
    assert bound_main(["--trace", str(TRACE), "--capacity-frac", "0.01"]) == 0
    assert capsys.readouterr().out == "capacity_blocks=323  bound=0.0244\n"
