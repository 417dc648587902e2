from pathlib import Path
from typing import Any

import pytest

from node.config import load_node_config, node_config
from node.errors import ConfigError

TABLE: dict[str, Any] = {
    "node_id": "n0",
    "cluster": "c",
    "cluster_kind": "pd",
    "role": "decode",
    "model": "models/tiny",
}


def test_a_short_table_is_enough() -> None:
    config = node_config(TABLE)
    assert (config.node_id, config.model_name, config.engine) == ("n0", "tiny", "embedded")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "both"}, "role = 'both': allowed are 'prefill', 'decode'"),
        ({"cluster_kind": "xx"}, "cluster_kind = 'xx': allowed are 'prfaas', 'pd'"),
        ({"node_id": "a b"}, "only letters, digits"),
        ({"connections": 0}, "connections = 0: allowed is 1 to 256"),
        ({"lease_s": "long"}, "lease_s = 'long': it must be of type float"),
        ({"engine_args": ["--x", 1]}, "engine_args"),
        ({"colour": "red"}, "unknown key 'colour'; known keys are"),
        ({"threads": True}, "threads = True: it must be of type int"),
    ],
)
def test_key_value_and_what_is_allowed_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        node_config(TABLE | change)


def test_missing_keys_are_named() -> None:
    with pytest.raises(ConfigError, match="missing keys cluster, cluster_kind, role, model"):
        node_config({"node_id": "n"})


def test_an_integer_serves_as_a_float() -> None:
    assert node_config(TABLE | {"lease_s": 5}).lease_s == 5.0


@pytest.mark.parametrize(("text", "message"), [("[node", "not valid TOML"), ("[nod]\n", "unknown table 'nod'")])
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_node_config(path)
