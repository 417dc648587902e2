"""What was once taken without a word and did nothing, or something else than it said."""

import csv
import io
import json

import pytest

from planner.commands.cli import main
from planner.errors import InputError
from planner.model.fitting import fit_metrics
from planner.model.profile import PrefillCurve
from planner.model.traces import read_requests
from planner.solve.sensitivity.sweeps import Sweep
from tests.planner.commands.inputs import PROFILE, ROWS, SITE, jsonl, written

LENGTHS = {"kind": "lengths", "tokens": [1000, 2000, 8000, 40_000], "output_tokens": 100}
SMALL = SITE | {"workload": LENGTHS}
REVERSED = SMALL | {"links": [{"source": "pd", "destination": "prfaas", "capacity_gbps": 100}]}
SESSION = {"session": "0", "t": 0.0, "input_length": 130, "output_length": 5, "blocks": [[0, 2]]}


def asked(capsys, *args):
    """(exit status, stdout, stderr)"""
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def test_a_link_the_wrong_way_round_is_told_how_to_turn(capsys, tmp_path):
    code, _, err = asked(capsys, "solve", "-c", written(tmp_path, REVERSED))
    assert (code, 'write source = "prfaas", destination = "pd"' in err) == (2, True)


def test_whatif_keeps_what_a_deployment_pins_and_its_ties(capsys, tmp_path):
    pinned = {"pinned": {"threshold_tokens": 8000, "num_prefill": 4}}
    site = written(tmp_path, SMALL | {"deployments": pinned})
    _, out, _ = asked(capsys, "whatif", "-c", site, "--deployment", "pinned", "--sweep", "b_out=100")
    row = next(csv.DictReader(io.StringIO(out)))
    plan = json.loads(asked(capsys, "solve", "-c", site, "--deployment", "pinned", "--json")[1])
    assert (float(row["threshold_tokens"]), int(row["num_prefill"])) == (8000, 4)
    for key in ("lambda_max_req_per_s", "offload_fraction", "egress_gbps", "tie_share"):
        assert float(row[key]) == pytest.approx(plan[key]), key
    _, out, _ = asked(capsys, "whatif", "-c", site, "--sweep", "b_out=100")
    row, plan = next(csv.DictReader(io.StringIO(out))), json.loads(asked(capsys, "solve", "-c", site, "--json")[1])
    assert plan["tie_share"] > 0
    assert float(row["offload_fraction"]) == pytest.approx(plan["offload_fraction"])
    code, _, err = asked(capsys, "whatif", "-c", site, "--deployment", "pinned", "--sweep", "n_pd=2")
    assert (code, "the deployment pins num_prefill=4" in err) == (2, True)


def test_a_knob_says_what_more_of_it_does():
    assert Sweep.parse("decode_rate=1.1").values == (1.1,)
    with pytest.raises(InputError, match=r"must be one of .*decode_rate"):
        Sweep.parse("decode=1.1")


def test_an_outage_after_the_last_request_is_told(capsys, tmp_path):
    site = written(tmp_path, SMALL)
    code, _, err = asked(capsys, "simulate", "-c", site, "--requests", "20", "--link-down", "90000:90010")
    assert (code, "the last request comes at" in err) == (2, True)


def test_a_profile_is_asked_for_whole_prompts(capsys, tmp_path):
    long = ROWS[0] | {"input_length": 200_000, "hash_ids": list(range(391))}
    again = long | {"timestamp": 50_000, "input_length": 200_100}
    (tmp_path / "t.jsonl").write_text(jsonl([*ROWS, again | {"timestamp": 60_000}, again]))
    asked(capsys, "fit", "--trace", tmp_path / "t.jsonl", "-o", tmp_path / "w.json")
    table = json.loads((tmp_path / "w.json").read_text())
    cut = [length for length in table["uncached_tokens"]["tokens"] if length < 131_072]
    table["uncached_tokens"] = {"tokens": cut, "weights": [1 / len(cut)] * len(cut)}
    (tmp_path / "w.json").write_text(json.dumps(table))
    code, _, err = asked(capsys, "solve", "-c", written(tmp_path, SMALL), "-w", tmp_path / "w.json")
    assert (code, "length 200100 tokens lies outside the profiled" in err) == (2, True)


def test_a_row_without_blocks_is_named(capsys, tmp_path):
    bare = {key: value for key, value in ROWS[6].items() if key != "hash_ids"}
    (tmp_path / "t.jsonl").write_text(jsonl([*ROWS[:6], bare, *ROWS[7:]]))
    code, _, err = asked(capsys, "fit", "--trace", tmp_path / "t.jsonl")
    assert (code, "row 7: missing: hash_ids, which 39 of 40 rows have" in err) == (2, True)


def test_a_hit_ratio_that_is_not_known_is_not_0(capsys, tmp_path):
    bare = [{key: value for key, value in row.items() if key != "hash_ids"} for row in ROWS]
    (tmp_path / "t.jsonl").write_text(jsonl(bare))
    code, out, _ = asked(capsys, "fit", "--trace", tmp_path / "t.jsonl", "-o", tmp_path / "w.json")
    assert (code, "hit ratio is not known" in out) == (0, True)
    assert json.loads((tmp_path / "w.json").read_text())["hit_ratio"] is None
    code, _, err = asked(capsys, "solve", "-c", written(tmp_path, SMALL), "-w", tmp_path / "w.json")
    assert (code, "prefix hits, which are not known" in err) == (0, True)
    code, _, err = asked(capsys, "fit", "--trace", tmp_path / "t.jsonl", "-c", written(tmp_path), "--cache-gb", 5)
    assert (code, "the trace names no blocks" in err) == (2, True)


def test_seconds_are_not_taken_for_milliseconds(capsys, tmp_path):
    rows = [ROWS[0] | {"timestamp": at * 0.3} for at in range(200)]
    (tmp_path / "t.jsonl").write_text(jsonl(rows))
    code, _, err = asked(capsys, "fit", "--trace", tmp_path / "t.jsonl")
    assert (code, "if it is in seconds, multiply it by 1000" in err) == (2, True)


def test_sessions_of_agents_are_read_and_other_shapes_named(capsys, tmp_path):
    turns = [SESSION, SESSION | {"t": 9.0, "input_length": 700, "blocks": [[0, 10]]}]
    (tmp_path / "s.jsonl").write_text(jsonl([*turns, SESSION | {"session": "1"}]))
    trace = read_requests(tmp_path / "s.jsonl", 100.0)
    assert (len(trace), trace.span_s <= 109, sorted(trace.prompt_tokens)) == (3, True, [130, 130, 700])
    assert asked(capsys, "fit", "--trace", tmp_path / "s.jsonl")[0] == 0
    (tmp_path / "o.jsonl").write_text(jsonl([{"at": 0, "prompt": 5}]))
    code, _, err = asked(capsys, "fit", "--trace", tmp_path / "o.jsonl")
    assert (code, "row 1: fields at, prompt: an unknown shape; known are Mooncake's" in err) == (2, True)


def test_a_curve_that_falls_is_refused():
    with pytest.raises(InputError, match=r"0\.5 s for 2000 tokens, 1 s for 1000: more tokens never take less time"):
        PrefillCurve(points=((1000, 1.0), (2000, 0.5), (3000, 2.0)), valid_tokens=(1000, 3000))
    with pytest.raises(InputError, match="more tokens never take less time"):
        PrefillCurve(coefficients=(1.0, -1e-4, 1e-8), valid_tokens=(1, 4000))


def test_a_profile_that_falls_fails_its_check(capsys, tmp_path):
    curve = PROFILE["prefill"]["h20x8"] | {"coefficients": [9.0, -1e-5, 0.0]}
    profile = PROFILE | {"prefill": {"h20x8": {k: v for k, v in curve.items() if k not in ("points", "interpolation")}}}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    code, _, err = asked(capsys, "profile", "check", tmp_path / "p.json")
    assert (code, "more tokens never take less time" in err) == (2, True)


def test_a_cache_larger_than_can_be_simulated_is_told(capsys, tmp_path):
    (tmp_path / "t.jsonl").write_text(jsonl(ROWS))
    argv = ("simulate", "-c", written(tmp_path), "--trace", tmp_path / "t.jsonl", "--cache-gb")
    code, _, err = asked(capsys, *argv, "100000000")
    assert (code, "GB of this model are simulated" in err) == (2, True)


def test_what_a_gateway_has_counted_as_cached_is_the_hit_ratio():
    lines = [
        'prfaas_uncached_prompt_tokens_bucket{le="1024.0"} 2', 'prfaas_uncached_prompt_tokens_bucket{le="+Inf"} 2',
        "prfaas_uncached_prompt_tokens_sum 1500", 'prfaas_output_tokens_bucket{le="+Inf"} 2',
        "prfaas_output_tokens_sum 20", 'prfaas_prompt_tokens_total{source="cache"} 500',
        'prfaas_prompt_tokens_total{source="computed"} 1500',
    ]  # fmt: skip
    assert fit_metrics("\n".join(lines))["hit_ratio"] == 0.25
    assert fit_metrics("\n".join(lines[:5]))["hit_ratio"] is None
