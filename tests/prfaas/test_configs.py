"""Every shipped configuration can be read by what it is for."""

from pathlib import Path

import pytest

from gateway.config import load as load_gateway
from node.config import load_node_config
from prfaas.topology import DEFAULT_FILE, load_topology

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("hosts/*-*.toml")), ids=lambda path: path.stem)
def test_nodes(path: Path) -> None:
    assert load_node_config(path).node_id == path.stem


def test_gateway() -> None:
    config = load_gateway(CONFIGS / "hosts" / "gateway.toml")
    agents = {f"{node.host}:{node.control_port}" for node in map(load_node_config, CONFIGS.glob("hosts/*-*.toml"))}
    assert {node.agent for node in config.nodes} == agents


@pytest.mark.parametrize(("name", "engine"), [("local.toml", "embedded"), ("vllm_local.toml", "vllm")])
def test_topology(name: str, engine: str) -> None:
    nodes = load_topology(CONFIGS / name, Path(".prfaas")).nodes
    assert {node.engine for node in nodes} == {engine}


def test_the_file_to_copy_is_the_one_that_runs() -> None:
    assert (CONFIGS / "local.toml").read_text() == DEFAULT_FILE.read_text()
