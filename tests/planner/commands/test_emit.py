"""What is emitted is taken by what reads it: the chart's schema, a gateway's file, `prfaas init` and the files it writes."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from gateway.config.gateway import load
from planner.commands.cli import main
from prfaas.cli import main as prfaas
from tests.planner.commands.inputs import CONFIGS

CHART = Path(__file__).parents[3] / "deploy/helm/prfaas"
CASE = str(CONFIGS / "case_study.toml")
PLAN = {"lambda_max_req_per_s": 3.0, "threshold_tokens": 19_684, "num_prefill": 3, "num_decode": 5, "num_prfaas": 4}


@pytest.fixture
def plan(tmp_path):
    return written(tmp_path, PLAN)


def written(folder, table):
    path = folder / "plan.json"
    path.write_text(json.dumps(table))
    return str(path)


def emitted(capsys, plan, *more, site=CASE):
    assert main(["emit", plan, "-c", site, *more]) == 0
    return capsys.readouterr().out


def check(value, schema, definitions):
    """The parts of JSON Schema that the chart uses."""
    for part in schema.get("allOf", ()):
        check(value, part, definitions)
    assert set(schema.get("required", ())) <= (value.keys() if isinstance(value, dict) else set())
    if not schema.keys() - {"allOf", "required"}:
        return
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[-1]]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
    assert isinstance(value, kinds[schema.get("type", "string")]), (value, schema)
    assert "enum" not in schema or value in schema["enum"]
    assert "pattern" not in schema or re.search(schema["pattern"], value)
    assert value >= schema["minimum"] if "minimum" in schema else True
    for name, each in value.items() if isinstance(value, dict) else ():
        assert name in schema["properties"], name
        check(each, schema["properties"][name], definitions)
    for each in value if isinstance(value, list) else ():
        check(each, schema["items"], definitions)


def test_values_keep_the_charts_schema(capsys, plan):
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = yaml.safe_load((CHART / "values.yaml").read_text())
    for cluster, roles in (("pd", {"prefill": 3, "decode": 5}), ("prfaas", {"prefill": 4})):
        values = yaml.safe_load(emitted(capsys, plan, "--cluster", cluster))
        assert {pool["role"]: pool["replicas"] for pool in values["pools"]} == roles
        assert values.keys() <= known.keys()
        assert values["gateway"].keys() <= known["gateway"].keys()
        assert set(known["pools"][0]) - {"resources"} == set(values["pools"][0])
        for name, each in values.items():
            check(each, schema["properties"][name], schema["definitions"])
    assert yaml.safe_load(emitted(capsys, plan))["gateway"] == {"thresholdTokens": 19_684}


def test_a_gateways_file_takes_the_keys(capsys, tmp_path):
    plan = written(tmp_path, PLAN | {"tie_share": 0.25})
    head, rest = emitted(capsys, plan, "--as", "gateway").split("\n", 1)
    file = tmp_path / "gateway.toml"
    node = 'nodes = [{ agent = "127.0.0.1:7001" }]\nopen = true\ntokenizer_dir = "."\n'
    file.write_text(f"{head}\n{node}{rest}")
    found = load(file)
    assert (found.threshold_tokens, found.routing.tie_share) == (19_684, 0.25)
    tables = yaml.safe_load(emitted(capsys, plan))["gateway"]["tables"]
    file.write_text(f"[gateway]\n{node}{tables}")
    assert load(file).routing.tie_share == 0.25


def test_prfaas_init_writes_a_file_for_each_node(capsys, plan, tmp_path):
    far, near = (",".join(f"10.{at}.0.{one}" for one in range(1, count + 1)) for at, count in ((1, 4), (2, 9)))
    line = emitted(capsys, plan, "--as", "init", "--hosts", f"prfaas={far}", "--hosts", f"pd={near}")
    program, command, _, *rest = shlex.split(line)
    assert program == "prfaas"
    model = tmp_path / "model"
    model.mkdir()
    rest[rest.index("MODEL_DIR")] = str(model)
    assert prfaas([command, str(tmp_path / "site"), *rest, "--plain", "--yes"]) == 0
    names = [path.name for path in (tmp_path / "site").rglob("*.toml")]
    assert len([name for name in names if name not in ("gateway.toml", "plan.toml")]) == 4 + 3 + 5


def test_a_plan_without_prfaas_nodes_has_no_threshold(capsys, tmp_path):
    plan = written(tmp_path, PLAN | {"num_prfaas": 0})
    assert yaml.safe_load(emitted(capsys, plan)).keys() == {"pools"}
    assert "threshold_tokens =" not in emitted(capsys, plan, "--as", "gateway")
    assert yaml.safe_load(emitted(capsys, plan, "--cluster", "prfaas"))["pools"] == []


def test_a_fleets_plan_is_emitted_cluster_by_cluster(capsys, tmp_path):
    plan, site = str(tmp_path / "fleet.json"), str(CONFIGS / "pairs.toml")
    assert main(["solve", "-c", site, "-o", plan]) == 0
    capsys.readouterr()
    table = json.loads(Path(plan).read_text())
    for each in table["pd_clusters"]:
        pools = yaml.safe_load(emitted(capsys, plan, "--cluster", each["name"], site=site))["pools"]
        replicas = {pool["role"]: pool["replicas"] for pool in pools}
        assert replicas.get("prefill", 0) == each["num_prefill"]
        assert replicas.get("decode", 0) == each["num_decode"]


@pytest.mark.parametrize(
    ("table", "more", "why"),
    [
        (PLAN, ("--cluster", "east"), "must be one of prfaas, pd"),
        (PLAN | {"num_prfaas": 9}, (), "9 PrfaaS instances, cluster 'prfaas' has 4"),
        (PLAN | {"num_prfaas": -1}, (), "num_prfaas = -1"),
        (PLAN, ("--as", "init", "--hosts", "pd=a,b"), "4 machines are planned, 0 are named"),
        (PLAN, ("--as", "init", "--hosts", "pd"), "write CLUSTER=HOST,HOST"),
        (PLAN | {"prfaas_clusters": 1}, (), "prfaas_clusters = 1"),
    ],
)
def test_what_cannot_be_emitted_is_told(capsys, tmp_path, table, more, why):
    assert main(["emit", written(tmp_path, table), "-c", CASE, *more]) == 2
    assert why in capsys.readouterr().err
