import json
import lzma
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import InputError
from planner.model.fitting import FoundPrefixes, burst_index, fit, fit_metrics, workload_of
from planner.model.site import read_fitted
from planner.model.traffic import Lengths
from planner.model.workload import Trace, diurnal, infinite_cache_hits, poisson, read_trace
from tests.planner.traces import MOONCAKE


def test_a_mooncake_trace_is_what_its_readme_says():
    trace = read_trace(MOONCAKE)
    assert len(trace) == 400
    assert trace.blocks is not None
    sizes = [len(ids) for ids in trace.blocks]
    assert sizes == [-(-int(n) // 512) for n in trace.prompt_tokens]
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert trace.arrival_s[-1] < 3600  # milliseconds were understood


def test_ticks_are_spread_and_the_order_is_kept():
    trace = read_trace(MOONCAKE)
    spread = trace.spread(np.random.default_rng(0))
    assert len(np.unique(spread.arrival_s)) == len(trace)
    assert (np.diff(spread.arrival_s) >= 0).all()
    assert np.floor(spread.arrival_s / 3) * 3 == pytest.approx(trace.arrival_s, abs=0.002)
    exact = poisson(Lengths.of(np.array([5.0])), 1, 1.0, 100, np.random.default_rng(0))
    assert exact.spread(np.random.default_rng(0)) is exact


@pytest.mark.parametrize(
    ("name", "text", "arrivals", "prompts"),
    [
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
            [0, 4.314579],
            [374, 396],
        ),
        (
            "azure.jsonl",
            '{"timestamp": 1500.5, "input_length": 10, "output_length": 1}\n\n'
            '{"timestamp": 0, "input_length": 7, "output_length": 0}\n',
            [0, 1.5005],
            [7, 10],
        ),
        (
            "log.jsonl",
            '{"arrived_s": 1763700000.5, "total": 9, "output_tokens": 3, "cached": 4}\n'
            '{"arrived_s": 1763700002.0, "total": 8, "output_tokens": 3, "cached": 0}\n',
            [0, 1.5],
            [9, 8],
        ),
        (
            "qwen.jsonl",
            '{"chat_id": 0, "timestamp": 2.5, "input_length": 200, "output_length": 1, "hash_ids": [1, 2]}\n',
            [0.0],
            [200],
        ),
    ],
)
def test_formats_are_told_apart(tmp_path, name, text, arrivals, prompts):
    (tmp_path / name).write_text(text)
    trace = read_trace(tmp_path / name)
    assert trace.arrival_s == pytest.approx(arrivals, abs=1e-5)
    assert list(trace.prompt_tokens) == prompts
    assert (trace.output_tokens >= 1).all()
    with lzma.open(tmp_path / f"{name}.xz", "wt") as packed:
        packed.write(text)
    assert read_trace(tmp_path / f"{name}.xz").arrival_s == pytest.approx(arrivals, abs=1e-5)


def test_a_request_log_is_a_folder_of_files(tmp_path):
    def line(unix_s: float, total: int, output: int, status: int = 200) -> str:
        fields = {
            "arrived_s": 5.0,
            "unix_s": unix_s,
            "total": total,
            "output_tokens": output,
            "cached": 0,
            "status": status,
        }
        return json.dumps({**fields, "block_tokens": 64, "hash_ids": list(range(-(-total // 64)))}) + "\n"

    (tmp_path / "requests-1-1.jsonl").write_text(line(1e9, 200, 10) + line(1e9 + 3, 100, 30) + '{"arrived_s": 5')
    (tmp_path / "requests-1-2.jsonl").write_text(line(1e9 + 1, 0, 0, 401) + line(1e9 + 2, 300, 0, 429))
    (tmp_path / "other.txt").write_text("not ours")
    trace = read_trace(tmp_path)
    assert list(trace.arrival_s) == [0, 2, 3]
    assert list(trace.prompt_tokens) == [200, 300, 100]
    assert list(trace.output_tokens) == [10, 20, 30]  # of what was refused: as of what was answered
    assert (trace.block_size, trace.blocks[2]) == (64, (0, 1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no files called requests-\*"):
        read_trace(tmp_path / "empty")
    (tmp_path / "requests-2-1.jsonl").write_text(line(1e9, 200, 10).replace("64", "128"))
    with pytest.raises(InputError, match="blocks of 128 tokens, of 64 before"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"timestamp": 1}\n', "row 1: missing: input_length"),
        ("what\n", "line 1: not JSON"),
    ],
)
def test_bad_traces_are_named(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "missing.jsonl")


def test_hits_of_a_cache_that_never_evicts():
    trace = read_trace(MOONCAKE)
    hits = infinite_cache_hits(trace)
    assert hits[0] == 0
    assert (hits <= trace.prompt_tokens).all()
    assert hits.sum() > 0.02 * trace.prompt_tokens.sum()


def test_a_fitted_workload_can_be_read_back(tmp_path):
    trace = read_trace(MOONCAKE)
    table = fit(trace, infinite_cache_hits(trace))
    (tmp_path / "w.json").write_text(json.dumps(table))
    workload = read_fitted(tmp_path / "w.json")
    direct = workload_of(trace, infinite_cache_hits(trace))
    assert workload.lengths.mean == pytest.approx(direct.lengths.mean)
    assert workload.hit_ratio == direct.hit_ratio
    assert workload.output_tokens == pytest.approx(trace.output_tokens.mean())


def test_burstiness_of_poisson_is_one():
    rng = np.random.default_rng(0)
    assert burst_index(np.cumsum(rng.exponential(0.1, 20_000)), 1.0) == pytest.approx(1.0, abs=0.1)
    assert burst_index(np.arange(1000.0), 10.0) == pytest.approx(0.0, abs=0.01)
    assert burst_index(np.arange(5.0), 10.0) is None


def test_poisson_and_diurnal_rates():
    law = Lengths.of(np.array([100.0, 200.0]))
    rng = np.random.default_rng(1)
    assert poisson(law, 10, 4.0, 4000, rng).span_s == pytest.approx(1000, rel=0.1)
    day = diurnal([law, law], [10, 20], [1.0, 3.0], 1000.0, rng)
    assert (day.arrival_s < 1000).sum() == pytest.approx(1000, rel=0.15)
    assert (day.arrival_s >= 1000).sum() == pytest.approx(3000, rel=0.1)
    assert (np.diff(day.arrival_s) >= 0).all()
    assert set(day.output_tokens[day.arrival_s >= 1000]) == {20}


METRICS = """# TYPE prfaas_uncached_prompt_tokens histogram
prfaas_uncached_prompt_tokens_bucket{route="local",le="1024.0"} 2.0
prfaas_uncached_prompt_tokens_bucket{route="local",le="8192.0"} 3.0
prfaas_uncached_prompt_tokens_bucket{route="local",le="+Inf"} 3.0
prfaas_uncached_prompt_tokens_sum{route="local"} 5000.0
prfaas_uncached_prompt_tokens_bucket{route="remote",le="1024.0"} 0.0
prfaas_uncached_prompt_tokens_bucket{route="remote",le="8192.0"} 0.0
prfaas_uncached_prompt_tokens_bucket{route="remote",le="+Inf"} 1.0
prfaas_uncached_prompt_tokens_sum{route="remote"} 15000.0
prfaas_output_tokens_bucket{le="+Inf"} 4.0
prfaas_output_tokens_sum 400.0
"""


def test_a_workload_from_the_gateways_metrics(tmp_path):
    table = fit_metrics(METRICS, span_s=8.0)
    assert (table["requests"], table["rate_req_per_s"], table["output_tokens_mean"]) == (4, 0.5, 100.0)
    (tmp_path / "w.json").write_text(json.dumps(table))
    workload = read_fitted(tmp_path / "w.json")
    assert workload.lengths.mean == pytest.approx(5000)
    assert list(workload.lengths.weights) == [0.5, 0.25, 0.25]


def test_a_fitted_workload_knows_how_much_answers_differ(tmp_path):
    trace = poisson(Lengths.of(np.array([1000.0])), 100, 1.0, 4, np.random.default_rng(0))
    trace = replace(trace, output_tokens=np.array([100.0, 300.0, 100.0, 300.0]))
    assert workload_of(trace, None).output_spread == pytest.approx(0.5)
    (tmp_path / "w.json").write_text(json.dumps(fit(trace, None)))
    assert read_fitted(tmp_path / "w.json").output_spread == pytest.approx(0.5)


def test_metrics_without_lengths_are_refused():
    with pytest.raises(InputError, match="prfaas_output_tokens is missing or empty"):
        fit_metrics(METRICS.replace("prfaas_output_tokens", "other"))


def test_a_workload_says_what_is_known_of_its_lengths_and_how_bursty_it_is(tmp_path):
    trace = Trace(
        name="t", arrival_s=np.repeat(np.arange(0.0, 200.0, 20.0), 5), prompt_tokens=np.full(50, 2_000.0),
        output_tokens=np.full(50, 100.0),
    )  # fmt: skip
    cached = np.where(np.arange(50) % 2, 1_536.0, 0.0)
    found = FoundPrefixes.everywhere(trace, cached, 1024)
    path = tmp_path / "w.json"
    path.write_text(json.dumps(fit(trace, found)))
    read, direct = read_fitted(path), workload_of(trace, found)
    for each in (read, direct):
        assert each.burst_index > 2
        assert list(each.lengths.tokens) == [464.0, 2_000.0]
        assert list(each.lengths.held) == [1.0, 0.0]
        assert list(each.lengths.cached) == [1_536.0, 0.0]
        assert each.lengths.held_share == 0.5
    assert workload_of(trace, cached).lengths.held is None


def test_thinned_lengths_keep_what_is_known_of_them():
    rng = np.random.default_rng(0)
    samples = rng.random(1_000) * 1e4
    lengths = Lengths.of(
        samples, held=rng.integers(0, 2, 1_000).astype(float), cached=rng.random(1_000), computed=samples / 2
    )
    thin = lengths.thinned(50)
    assert thin.held_share == pytest.approx(lengths.held_share)
    assert thin.weights @ thin.uncached == pytest.approx(lengths.weights @ lengths.uncached)
    assert thin.weights @ thin.cached == pytest.approx(lengths.weights @ lengths.cached)
    assert lengths.alone().mean == pytest.approx(lengths.mean / 2)
