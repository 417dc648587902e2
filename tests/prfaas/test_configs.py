"""Every shipped configuration can be read by what it is for."""

from collections import Counter
from pathlib import Path

import pytest

from gateway.config.gateway import load as load_gateway
from membership.lines import by_ends, read_lines
from node.config import load_node_config
from planner.model.site import load_site
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions
from prfaas.system.topology import DEFAULT_FILE, load_topology

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("hosts/*-*.toml")), ids=lambda path: path.stem)
def test_nodes(path: Path) -> None:
    assert load_node_config(path).node_id == path.stem


def test_gateway() -> None:
    config = load_gateway(CONFIGS / "hosts" / "gateway.toml")
    agents = {f"{node.host}:{node.control_port}" for node in map(load_node_config, CONFIGS.glob("hosts/*-*.toml"))}
    assert {node.agent for node in config.nodes} == agents


def test_lines() -> None:
    (both,) = by_ends(read_lines(CONFIGS / "lines.toml")).values()
    assert (both.label, both.shared_by) == ("carrier-a + carrier-b", ("backups",))


@pytest.mark.parametrize(
    ("name", "engine"), [("local.toml", "embedded"), ("vllm_local.toml", "vllm"), ("case_study_live.toml", "emulated")]
)
def test_topology(name: str, engine: str) -> None:
    nodes = load_topology(CONFIGS / name, Path(".prfaas")).nodes
    assert {node.engine for node in nodes} == {engine}


def test_the_live_case_study_has_the_instances_of_the_plan_that_it_names() -> None:
    site = load_site(CONFIGS / "case_study.toml")
    plan = outline(site, SolveOptions.as_in_paper())
    topology = load_topology(CONFIGS / "case_study_live.toml", Path(".prfaas"))
    roles = Counter((node.cluster_kind, node.role) for node in topology.nodes)
    assert roles == {
        ("prfaas", "prefill"): plan.num_prfaas,
        ("pd", "prefill"): plan.num_prefill,
        ("pd", "decode"): plan.num_decode,
    }
    # The last token of a prompt is the decode node's.
    assert topology.gateway["threshold_tokens"] - 1 == topology.model.scale.tokens_of(plan.threshold_tokens)


def test_the_file_to_copy_is_the_one_that_runs() -> None:
    assert (CONFIGS / "local.toml").read_text() == DEFAULT_FILE.read_text()
