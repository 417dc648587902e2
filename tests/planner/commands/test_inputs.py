"""Inputs that are wrong, of every kind that the planner reads: each is refused by name, and none ends in a traceback."""

import gzip
import json
import lzma
import random
import time

import pytest
import tomli_w
import zstandard

from planner.commands.cli import main
from planner.model.reading import Range, open_text
from planner.model.site import load_site
from tests.planner.commands.inputs import CONFIGS, PROFILE, ROWS, SITE, jsonl, written
from transport.control.settings import SettingsError


def asked(capsys, *args):
    """(exit status, what stderr says)"""
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err


# Traces


@pytest.mark.parametrize("key", ["input_length", "output_length", "timestamp"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -500, None, "5", 1e30, True, [5]])
def test_a_value_that_no_request_can_have_is_named(capsys, tmp_path, key, value):
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl([row | ({key: value} if at == 5 else {}) for at, row in enumerate(ROWS)]))
    code, err = asked(capsys, "fit", "--trace", path)
    assert code == 2
    assert f"error: trace {path}: row 6: {key} = " in err


@pytest.mark.parametrize("ids", [5, [1.5], ["a"], [[1]], None])
def test_blocks_are_named_by_integers(capsys, tmp_path, ids):
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl([ROWS[0] | {"hash_ids": ids}]))
    code, err = asked(capsys, "fit", "--trace", path)
    assert (code, "row 1: hash_ids = " in err) == (2, True)


def test_a_time_far_from_all_others_is_named(capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl([*ROWS, ROWS[0] | {"timestamp": 1.7e12}]))
    code, err = asked(capsys, "simulate", "-c", CONFIGS / "case_study.toml", "--trace", path)
    assert (code, "row 41 comes 1.7e+09 s after row 1: a trace spans at most" in err) == (2, True)


@pytest.mark.parametrize("spelled", ["t.jsonl", "t.jsonl.gz", "t.jsonl.xz", "t.jsonl.zst", "bom.jsonl", "two.jsonl.gz"])
@pytest.mark.parametrize("name", [None, "other"])
def test_a_file_is_known_by_its_beginning(capsys, tmp_path, spelled, name):
    plain = jsonl(ROWS).encode()
    data = {
        "t.jsonl": plain,
        "t.jsonl.gz": gzip.compress(plain),
        "t.jsonl.xz": lzma.compress(plain),
        "t.jsonl.zst": zstandard.ZstdCompressor().compress(plain),
        "bom.jsonl": b"\xef\xbb\xbf" + plain,
        "two.jsonl.gz": gzip.compress(plain[:1000]) + gzip.compress(plain[1000:]),
    }[spelled]
    path = tmp_path / (name or spelled)
    path.write_bytes(data)
    with open_text(path) as text:
        assert text.read().encode() == plain
    assert asked(capsys, "fit", "--trace", path)[0] == 0


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, zstandard.ZstdCompressor().compress])
@pytest.mark.parametrize("spoil", [lambda data: data[: len(data) // 2], lambda data: data[:20] + bytes(200)])
def test_a_compressed_file_that_was_cut_or_damaged_is_named(capsys, tmp_path, pack, spoil):
    path = tmp_path / "t"
    path.write_bytes(spoil(pack(random.Random(0).randbytes(300_000).hex().encode())))
    code, err = asked(capsys, "fit", "--trace", path)
    assert (code, f"error: trace {path}: " in err) == (2, True)


@pytest.mark.parametrize("data", [b"\xff\xfet\0", b"\x80", b"\x1f\x8b\xff\0", b"[1]\n", b"5\n", b"{}\n", b"[" * 10**6])
@pytest.mark.parametrize("option", ["--trace", "--metrics"])
def test_what_is_no_such_file_is_named(capsys, tmp_path, data, option):
    path = tmp_path / "t"
    path.write_bytes(data)
    code, err = asked(capsys, "fit", option, path)
    assert code == 2
    assert err.startswith("error: ")


def test_a_cut_last_line_is_an_error_but_for_a_log_that_is_being_written(capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl(ROWS)[:-10])
    code, err = asked(capsys, "fit", "--trace", path)
    assert (code, "line 40: not JSON" in err) == (2, True)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_azures_times_are_in_utc(capsys, tmp_path, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        rows = [f"2023-11-05 {at // 2:02}:{30 * (at % 2):02}:00.0000000,1000,50\n" for at in range(20)]
        (tmp_path / "T.CSV").write_text("\ufeff" + AZURE + "".join(rows))
        assert main(["fit", "--trace", str(tmp_path / "T.CSV"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["span_s"] == 34_200
        stamps = [f"2024-05-12 00:00:{at:02}{'' if at == 7 else '.123456'}+00:00,1000,50\n" for at in range(20)]
        (tmp_path / "b.csv").write_text(AZURE + "".join(stamps))
        assert main(["fit", "--trace", str(tmp_path / "b.csv"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["span_s"] == 19
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,1,1", "TIMESTAMP = 'yesterday': must be a time"),
        ("2023-11-05 00:00:00,nan,1", "ContextTokens = NaN"),
        ("2023-11-05 00:00:00,1", "GeneratedTokens = None"),
        ("2023-11-05 00:00:00,1,x", "GeneratedTokens = 'x'"),
    ],
)
def test_a_cell_that_is_wrong_is_named(capsys, tmp_path, row, message):
    (tmp_path / "t.csv").write_text(AZURE + "2023-11-05 00:00:00,1,1\n" + row + "\n")
    code, err = asked(capsys, "fit", "--trace", tmp_path / "t.csv")
    assert (code, f"row 2: {message}" in err) == (2, True)


def fitted(capsys, path):
    assert main(["fit", "--trace", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_only_what_could_have_been_served_is_traffic(capsys, tmp_path):
    def logged(at, status, total, output):
        return {
            "status": status,
            "arrived_s": at,
            "unix_s": 1e9 + at,
            "total": total,
            "cached": 0,
            "output_tokens": output,
        }

    served = [logged(at, 200, 8000, 500) for at in range(10)]
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl(served))
    alone = fitted(capsys, path)
    path.write_text(jsonl(served + [logged(at + 0.5, 400, 5, 0) for at in range(9)]))
    assert fitted(capsys, path) == alone
    path.write_text(
        jsonl(served + [logged(at + 0.5, status, 8000, 0) for at in range(3) for status in (429, 499, 502)])
    )
    more = fitted(capsys, path)
    assert (more["requests"], more["output_tokens_mean"]) == (19, 500)
    path.write_text(jsonl([*served, logged(3, 499, 8000, 900)]))
    assert fitted(capsys, path)["output_tokens"]["max"] == 900


def test_empty_prompts_hit_nothing(capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl([row | {"input_length": 0} for row in ROWS]))
    assert fitted(capsys, path)["hit_ratio"] == 0


def test_a_slice_of_a_trace_counts_from_its_first_request(capsys, tmp_path):
    reports = []
    for name, later_ms in (("early", 0), ("late", 3_600_000)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(jsonl([row | {"timestamp": row["timestamp"] + later_ms} for row in ROWS]))
        site = CONFIGS / "case_study.toml"
        assert main(["simulate", "-c", str(site), "--trace", str(path), "--link-down", "10:20", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]
    assert reports[0]["egress_mean_gbps"] > 0


# Metrics


def metrics(total="120000", stamp="", label=""):
    def of(name):
        counts = (("100", 10), ("1000", 60), ("10000", 100), ("+Inf", 100))
        rows = [f'{name}_bucket{{{label}le="{edge}"}} {count}{stamp}' for edge, count in counts]
        return "\n".join([*rows, f"{name}_sum{{{label}}} {total}{stamp}", f"{name}_count 100{stamp}", ""])

    return of("prfaas_uncached_prompt_tokens") + of("prfaas_output_tokens")


@pytest.mark.parametrize("stamp", ["", " 1795617020000"])
@pytest.mark.parametrize("label", ["", 'file="gateway.py",', 'cluster="a} b",', r'text="a \"le=\" b",'])
def test_metrics_are_read_as_prometheus_writes_them(capsys, tmp_path, stamp, label):
    (tmp_path / "m").write_text(metrics(stamp=stamp, label=label))
    assert main(["fit", "--metrics", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["uncached_tokens"]["mean"] == 1200


@pytest.mark.parametrize("total", ["NaN", "+Inf", "-1", "x", "0"])
def test_a_sum_that_is_none_is_named(capsys, tmp_path, total):
    (tmp_path / "m").write_text(metrics(total))
    code, err = asked(capsys, "fit", "--metrics", tmp_path / "m")
    assert (code, "prfaas_uncached_prompt_tokens" in err) == (2, True)


# Sites, profiles, workloads


def changed(table, path, value):
    """A copy of `table` with another value, or without one where it is ...; a path like `clusters.0.name`."""
    copy = json.loads(json.dumps(table))
    *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
    inside = copy
    for key in way:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("workload.mu", value) for value in (0, 20_000, float("inf"), float("nan"), "9")),
        *(("workload.sigma", value) for value in (1e-300, float("nan"), -1)),
        *((f"slo.{key}", value) for key in ("ttft_p90_s", "tbt_s") for value in (float("nan"), -1, 0)),
        ("workload.output_tokens", float("nan")),
        ("workload.max_tokens", float("inf")),
        ("workload.kind", ["lognormal"]),
        ("links.0.quantiles_gbps", [float("nan")]),
        ("links.0.destination", "prfaas"),
        ("clusters.0.instances", 10**400),
        ("clusters.0.price_per_hour", 10**400),
        *(("deployments.naive.num_prefill", value) for value in (99, -1)),
        *(("deployments.naive.threshold_tokens", value) for value in (float("nan"), -5)),
        ("deployments.homogeneous.instances", {"prfas": 0, "pd": 12}),
    ],
)
def test_a_site_that_cannot_be_is_refused_by_key(capsys, tmp_path, path, value):
    code, err = asked(capsys, "solve", "-c", written(tmp_path, changed(SITE, path, value)))
    assert code == 2
    assert str(tmp_path / "site.toml") in err
    assert (next(iter(value)) if isinstance(value, dict) else path.split(".")[-1]) in err


def test_two_lines_of_one_pair_carry_as_much_as_one(tmp_path):
    (link,) = SITE["links"]
    half = link["capacity_gbps"] / 2
    lines = [{"name": name, **link, "capacity_gbps": half + 3, "shared_gbps": 3} for name in ("a", "b")]
    far = {"source": "elsewhere", "destination": "pd", "capacity_gbps": 1}  # of another site
    (tmp_path / "lines.toml").write_text(tomli_w.dumps({"lines": [*lines, far]}))
    one, two, read = (
        load_site(written(tmp_path, SITE | said))
        for said in ({}, {"links": lines}, {"links": [], "lines_file": str(tmp_path / "lines.toml")})
    )
    assert two.links == read.links
    assert [each.bytes_per_s for each in two.links] == [each.bytes_per_s for each in one.links]


def test_two_links_of_one_pair_are_refused(capsys, tmp_path):
    code, err = asked(capsys, "solve", "-c", written(tmp_path, SITE | {"links": SITE["links"] * 2}))
    assert (code, "there are two from 'prfaas' to 'pd'" in err) == (2, True)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("prefill.h20x8.coefficients", [float("nan"), 0, 0], "coefficients[0] = NaN"),
        ("prefill.h20x8.coefficients", [1, 0], "coefficients = (1.0, 0.0)"),
        ("prefill.h20x8.coefficients", [-1, 0, 0], "-1 s for 1 tokens"),
        ("prefill.h20x8.coefficients", [1, -1e-4, 2.4e-9], "s for 20833.3 tokens"),
        ("prefill.h20x8.coefficients", [0, 0, 0], "0 s for 1 tokens"),
        ("prefill.h20x8.valid_tokens", ..., "valid_tokens = None"),
        ("prefill.h20x8.valid_tokens", [5], "valid_tokens = (5.0,)"),
        ("prefill.h200x8.points", [[1, 1], [1, 2], [2, 3], [2]], "points[3] = (2.0,)"),
        ("kv.bytes_per_token", -1, "bytes_per_token = -1"),
        ("kv.bytes_per_token", float("nan"), "bytes_per_token = NaN"),
        ("decode.h20x8.step_s", float("nan"), "step_s = NaN"),
        ("decode.h20x8.max_running", 10**9, "max_running=1000000000"),
        ("prefil", {}, "did you mean 'prefill'"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_by_key(capsys, tmp_path, path, value, named):
    code, err = asked(capsys, "solve", "-c", written(tmp_path, profile=changed(PROFILE, path, value)))
    assert code == 2
    assert f"profile {tmp_path / 'profile.json'}" in err
    assert named in err


def test_a_law_that_is_narrow_next_to_its_ends_is_no_error(capsys, tmp_path):
    """Its upper end is further away than any number next to 1 tells."""
    site = SITE | {"workload": SITE["workload"] | {"mu": 7.0, "sigma": 0.5}}
    assert asked(capsys, "solve", "-c", written(tmp_path, site))[0] == 0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("uncached_tokens.weights", [1] * 40),
        ("uncached_tokens.weights", [0] * 40),
        ("uncached_tokens.weights", [float("nan")] * 40),
        ("uncached_tokens.weights", [1]),
        ("uncached_tokens.tokens", []),
        ("uncached_tokens.tokens", list(range(40, 0, -1))),
        ("output_tokens_mean", float("nan")),
        ("output_tokens_mean", "5"),
        ("rate_req_per_s", -5),
        ("hit_ratio", 1.5),
        ("schema", 2),
        ("name", None),
    ],
)
def test_a_fitted_workload_that_cannot_be_is_refused_by_key(capsys, tmp_path, path, value):
    (tmp_path / "t.jsonl").write_text(jsonl(ROWS))
    assert main(["fit", "--trace", str(tmp_path / "t.jsonl"), "-o", str(tmp_path / "w.json")]) == 0
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps(changed(json.loads(workload.read_text()), path, value)))
    code, err = asked(capsys, "solve", "-c", written(tmp_path), "-w", workload)
    assert (code, f"error: {workload}" in err or f"workload {workload}" in err, path in err) == (2, True, True)


# Arguments


@pytest.mark.parametrize(
    "args",
    [
        ("simulate", "--requests", "50", "--seed", "-1"),
        ("simulate", "--requests", "50", "--increment", "-5"),
        ("simulate", "--requests", "50", "--day", "nan"),
        ("simulate", "--requests", "50", "--day=-1"),
        ("simulate", "--requests", "50", "--day=1e300"),
        ("simulate", "--requests", "1000000000000"),
        ("simulate", "--requests", "50", "--load", "1e-300"),
        ("simulate", "--requests", "50", "--link-down", "nan:5"),
        ("whatif", "--sweep", "decode_rate=0"),
        ("whatif", "--sweep", "n_pd=nan"),
        ("whatif", "--sweep", "b_out=1:10:0"),
        ("whatif", "--sweep", "b_out=1:10:1e12"),
        ("whatif", "--sweep", "output_tokens=nan"),
        ("whatif", "--sweep", "output_tokens=0"),
        ("whatif", "--sweep", "n_prfaas=1.5"),
        ("whatif", "--sweep", "b_out=1:9:200", "--sweep", "decode_rate=1:2:200"),
        ("saturate", "--requests", "50", "--slo", "ttft_p90<e"),
        ("saturate", "--requests", "50", "--slo", "tbt<0.05"),
        ("saturate", "--requests", "50", "--slo", "goodput<0.05"),
        ("solve", "--robust", "--spread", "1"),
        ("solve", "--robust", "--spread", "nan"),
    ],
)
def test_an_argument_that_is_none_is_named(capsys, args):
    code, err = asked(capsys, args[0], "-c", CONFIGS / "case_study.toml", *args[1:])
    assert code in (1, 2)
    assert "error: " in err


def test_an_slo_that_no_rate_breaks_says_so(capsys):
    site = CONFIGS / "case_study.toml"
    assert main(["saturate", "-c", str(site), "--requests", "100", "--slo", "tbt_p90<0.05"]) == 0
    assert "the largest is not known" in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), True, "1", None, -0.1, 1.1, 10**400])
def test_a_range_takes_numbers_only(value):
    with pytest.raises(SettingsError, match="x = "):
        Range(0, 1).of("x", value)
    assert Range(0, 1).of("x", 1) == 1.0


PLAN = {"threshold_tokens": 19_684, "num_prfaas": 4, "num_prefill": 3, "num_decode": 5}


@pytest.mark.parametrize("which", ["plan", "current"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"num_prfaas": ' + "1" * 5_000 + "}", "not JSON: "),
        ("[]", "the file = []: must be an object"),
        (json.dumps(PLAN | {"num_decode": "5"}), "num_decode = '5': must be a whole number of instances"),
        (json.dumps(PLAN | {"threshold_tokens": float("nan")}), "threshold_tokens = NaN: must be a number of tokens"),
        (json.dumps(PLAN | {"num_pd": [8]}), "num_pd = [8]: must be a whole number of instances"),
    ],
)
def test_plans_that_cannot_be_compared_are_named(capsys, tmp_path, which, text, said):
    paths = {name: tmp_path / f"{name}.json" for name in ("plan", "current")}
    for name, path in paths.items():
        path.write_text(text if name == which else json.dumps(PLAN))
    code, err = asked(capsys, "diff", paths["plan"], "--current", paths["current"])
    assert (code, err.startswith(f"error: plan {paths[which]}: {said}")) == (2, True)


def test_a_plan_says_how_many_instances_it_uses(capsys, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    code, err = asked(capsys, "diff", tmp_path / "plan.json", "--current", tmp_path / "plan.json")
    assert (code, err) == (2, f"error: plan {tmp_path}/plan.json: missing: num_prfaas\n")


def test_a_profile_with_an_integer_of_thousands_of_digits_is_no_json(capsys, tmp_path):
    (tmp_path / "p.json").write_text('{"schema": ' + "1" * 5_000 + "}")
    code, err = asked(capsys, "profile", "check", tmp_path / "p.json")
    assert (code, err.startswith(f"error: profile {tmp_path}/p.json: not JSON: ")) == (2, True)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("solve", "--rate", "abc"), "argument --rate: 'abc': must be a number"),
        (("simulate", "--seeds", "x"), "argument --seeds: 'x': must be a whole number"),
        (("simulate", "--cache-gb", "x"), "argument --cache-gb: 'x': must be a number"),
        (("solve", "--target", "ttft_s=two"), "ttft_s = 'two': must be a number of seconds"),
        (("simulate", "--link-down", "5"), "--link-down 5: must have the form FROM:UNTIL[:SOURCE:DESTINATION]"),
        (
            ("simulate", "--link-thin", "5:9"),
            "--link-thin 5:9: must have the form FROM:UNTIL:SHARE[:SOURCE:DESTINATION]",
        ),
    ],
)
def test_an_argument_is_named_in_words_of_its_user(capsys, args, said):
    code, err = asked(capsys, args[0], "-c", CONFIGS / "case_study.toml", *args[1:])
    assert (code in (1, 2), said in err) == (True, True)


@pytest.mark.parametrize("args", [("solve",), ("report",), ("whatif", "--sweep", "b_out=1:9")])
def test_where_a_result_goes_is_checked_before_the_work(capsys, tmp_path, args):
    site = tmp_path / "site.toml"  # is read first by the work, and is not there
    for output, message in (
        (tmp_path / "none" / "plan", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path, "is a folder"),
    ):
        code, err = asked(capsys, args[0], "-c", site, *args[1:], "-o", output)
        assert (code, err) == (
            2,
            f"error: --output {output}: {message}{'; name a file' if output == tmp_path else ''}\n",
        )
