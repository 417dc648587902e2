"""Results of benchmarks become runs, whichever tool wrote them."""

import json

import pytest

from planner.errors import InputError
from planner.profiles.results.read import read_runs
from tests.planner.profiles.results import AIC_COLUMNS, SWEEP, guidellm, sglang, vllm


def written(tmp_path, value, name="result.json"):
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_vllm(tmp_path):
    (run,) = read_runs(written(tmp_path, vllm(prompt=8_000, ttft_ms=700, running=1, step_ms=25)))
    assert (run.tool, run.source, run.requests) == ("vllm bench serve", "result.json", 10)
    assert (run.prompt_tokens, run.output_tokens, run.ttft_s, run.step_s) == (8_000, 201, 0.7, 0.025)
    assert run.is_alone
    assert run.decoding == pytest.approx(5.0 / 5.7)
    assert run.ttft_spread_s == pytest.approx(0.021)


def test_what_runs_at_once_follows_from_time_and_throughput(tmp_path):
    """Littles's law: a limit of 64 at once that was never reached says nothing."""
    busy = vllm(running=16)
    (run,) = read_runs(written(tmp_path, busy | {"max_concurrency": None}))
    assert (run.running, run.is_alone) == (pytest.approx(16), False)
    (run,) = read_runs(written(tmp_path, vllm(running=1) | {"max_concurrency": 64}))
    assert run.running == pytest.approx(1)


def test_sglang_has_a_result_on_each_line(tmp_path):
    lines = "".join(json.dumps(sglang(prompt=prompt)) + "\n" for prompt in (1_000, 8_000))
    runs = read_runs(written(tmp_path, lines, "bench.jsonl"))
    assert [(run.source, run.tool, run.prompt_tokens) for run in runs] == [
        ("bench.jsonl, line 1", "SGLang's bench_serving", 1_000),
        ("bench.jsonl, line 2", "SGLang's bench_serving", 8_000),
    ]
    assert runs[0].running == 0.99


def test_a_sweep_is_a_list_or_a_folder(tmp_path):
    assert len(read_runs(written(tmp_path, SWEEP, "summary.json"))) == 6
    folder = tmp_path / "sweep"
    for at, table in enumerate(SWEEP):
        (folder / f"run-{at}").mkdir(parents=True)
        written(folder / f"run-{at}", table, "run=0.json")
    written(folder, SWEEP, "summary.json")
    assert len(read_runs(folder)) == 6


def test_times_of_single_requests(tmp_path):
    details = {"input_lens": [1_000, 2_000, 0], "ttfts": [0.1, 0.2, 0.0], "itls": [[0.02], [0.02], []]}
    (run,) = read_runs(written(tmp_path, vllm() | details))
    assert run.prefills == ((1_000, 0.1), (2_000, 0.2))


def test_guidellm(tmp_path):
    runs = read_runs(written(tmp_path, guidellm((1_000, 120, 1.0, 25), (1_000, 800, 32.0, 40))))
    assert [(run.tool, run.prompt_tokens, run.ttft_s, run.step_s) for run in runs] == [
        ("GuideLLM", 1_000, 0.12, 0.025), ("GuideLLM", 1_000, 0.8, 0.04)
    ]  # fmt: skip
    assert runs[1].decoding == pytest.approx(32 * 8.0 / 8.8)


def test_aiconfigurator(tmp_path):
    rows = f"{AIC_COLUMNS}\nm,8000,200,0,1,1,1,1,300,20,8,1,1,sglang,h200_sxm,80\n"
    (run,) = read_runs(written(tmp_path, rows, "pareto.csv"))
    assert (run.is_estimate, run.prompt_tokens, run.step_s, run.ttft_s) == (True, 8_000, 0.02, pytest.approx(0.66))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "no result in it; known are vLLM's"),
        ("[]", "no result in it"),
        ("{}", "fields none: no result of a benchmark that is known"),
        ("5", "the file = 5: must be a table"),
        ("[1]", r"\[0\] = 1: must be a table"),
        ("not json", r"line 1: not JSON"),
        (vllm(completed=10) | {"completed": 0}, "completed = 0.0: must be above 0: no request was answered"),
        (vllm() | {"failed": 30}, "failed = 30.0: must be at most 10% of all requests, and is 75% of them"),
        (vllm() | {"duration": 0}, "duration = 0.0: must be above 0"),
        (vllm() | {"median_ttft_ms": float("nan")}, "median_ttft_ms = NaN: must be a number of milliseconds"),
        (vllm() | {"median_ttft_ms": -1}, "median_ttft_ms = -1"),
        (vllm() | {"total_input_tokens": "8000"}, "total_input_tokens = '8000'"),
        (vllm() | {"median_ttft_ms": None, "mean_ttft_ms": None}, "missing: median_ttft_ms or mean_ttft_ms"),
        (vllm() | {"input_lens": [5], "ttfts": []}, "ttfts = .*as long as input_lens"),
        (vllm() | {"input_lens": [5], "ttfts": ["x"]}, r"ttfts\[0\] = 'x'"),
        ({"benchmarks": 5}, "benchmarks = 5: must be an array of tables"),
        ({"benchmarks": [{}]}, r"benchmarks\[0\]: missing: metrics"),
        ({"benchmarks": [{"metrics": {}}]}, r"benchmarks\[0\]: missing: metrics.request_totals"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_named(tmp_path, value, said):
    path = written(tmp_path, value)
    with pytest.raises(InputError, match=said) as found:
        read_runs(path)
    assert str(found.value).startswith(f"benchmark {path}: ")


def test_the_place_of_a_wrong_field_is_named(tmp_path):
    path = written(
        tmp_path, "".join(json.dumps(each) + "\n" for each in (sglang(), sglang() | {"duration": -1})), "b.jsonl"
    )
    with pytest.raises(InputError, match=r"b.jsonl: line 2: duration = -1"):
        read_runs(path)
    with pytest.raises(InputError, match="no such file"):
        read_runs(tmp_path / "nothing.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \*.json in that folder"):
        read_runs(tmp_path / "empty")
    rows = f"{AIC_COLUMNS}\nm,8000,200,0,1,1,1,1,,20,8,1,1,sglang,h200_sxm,80\n"
    with pytest.raises(InputError, match="row 1: ttft = ''"):
        read_runs(written(tmp_path, rows, "pareto.csv"))


def test_requests_decode_for_as_long_as_their_tokens_took(tmp_path):
    """Steps of 30 ms, and prefills between them: 60 ms a token, so 64 requests decode at once and not 32."""
    table = vllm(running=64, step_ms=60, ttft_ms=1, completed=640) | {"median_itl_ms": 30.0}
    (run,) = read_runs(written(tmp_path, table))
    assert (run.step_s, run.decoding) == (0.03, pytest.approx(64, rel=1e-3))


def test_chunks_that_came_together_are_no_steps(tmp_path):
    (run,) = read_runs(written(tmp_path, vllm(step_ms=25) | {"median_itl_ms": 0.02}))
    assert run.step_s == 0.025


def test_requests_that_come_at_any_time_are_not_alone(tmp_path):
    """At a rate at which one is there on average, most meet another."""
    opened = {"max_concurrency": None, "request_rate": 0.2}
    (run,) = read_runs(written(tmp_path, vllm() | opened))
    assert (run.running, run.is_alone) == (pytest.approx(1), False)
    (rare,) = read_runs(written(tmp_path, vllm() | opened | {"duration": 1_000.0}))
    assert rare.is_alone
    (single,) = read_runs(written(tmp_path, vllm(completed=1) | opened))
    assert single.is_alone
    report = guidellm((1_000, 120, 1.0, 25))
    report["benchmarks"][0]["config"]["strategy"]["type_"] = "constant"
    assert not read_runs(written(tmp_path, report))[0].is_alone


def test_older_reports_of_guidellm_have_totals_beside_the_metrics(tmp_path):
    report = guidellm((1_000, 120, 1.0, 25))
    (table,) = report["benchmarks"]
    table["request_totals"] = table["metrics"].pop("request_totals")
    assert read_runs(written(tmp_path, report))[0].requests == 20
