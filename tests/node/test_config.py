from pathlib import Path
from typing import Any

import pytest

from node.config import load_node_config, node_config
from node.errors import NodeConfigError
from transport.path.pacing import DailyBudget

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
    ("values", "host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "127.0.0.7"}, "127.0.0.7"),
        ({"host": "10.0.0.1", "plain": True}, "127.0.0.1"),
        ({"host": "10.0.0.1", "plain": True, "metrics_key": "k"}, "10.0.0.1"),
        ({"host": "10.0.0.1", "plain": True, "metrics_host": "::1"}, "::1"),
        ({"metrics_host": "10.0.0.1", "metrics_key": "k"}, "10.0.0.1"),
    ],
)
def test_metrics_stay_on_this_machine_unless_a_key_guards_them(values: dict[str, Any], host: str) -> None:
    assert node_config({**TABLE, **values}).port("metrics").host == host


def test_picked_requests_are_taken_where_a_key_says_so() -> None:
    assert "picked" not in node_config(TABLE).listeners
    taking = node_config({**TABLE, "picked_port": 0, "picked_host": "10.0.0.1", "plain": True})
    assert (taking.port("picked").host, taking.port("picked").number) == ("10.0.0.1", 0)
    assert taking.plain_listeners == ("picked",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "both"}, "role = 'both': must be 'prefill' or 'decode'"),
        ({"cluster_kind": "xx"}, "cluster_kind = 'xx': must be 'prfaas' or 'pd'"),
        ({"node_id": "a b"}, "node_id = 'a b': must be of letters, digits"),
        ({"engine_args": ["--api-key", "sk-x"]}, "engine_args: --api-key: every user of this machine sees it"),
        ({"engine_args": ["--hf-token=hf_x"]}, "engine_args: --hf-token: every user of this machine sees it"),
        ({"metrics_host": "10.0.0.1"}, "metrics_host = '10.0.0.1': other machines reach it.*metrics_key"),
        ({"connections": 0}, "connections = 0: must be 1 to 256"),
        ({"stages": 0}, "stages = 0: must be 1 to 256"),
        ({"eviction_history_blocks": 0}, "eviction_history_blocks = 0"),
        ({"eviction": "sieve"}, "eviction = 'sieve': must be 'default', 'lru' or 'wa'"),
        ({"lease_s": "long"}, "lease_s = 'long': must be a number"),
        ({"engine_args": ["--x", 1]}, r"engine_args\[1\] = 1: must be a string"),
        ({"xyz": "red"}, "unknown key 'xyz'; known are allowed_media_domains, authority, block_size, "),
        ({"cache_byte": 1}, r"unknown key 'cache_byte' \(did you mean 'cache_bytes'\?\); known are"),
        ({"connections": "many"}, "connections = 'many': must be 1 to 256, or 'auto'"),
        ({"connections": 1.5}, "connections = 1.5: must be an integer or a string"),
        ({"congestion_control": "reno"}, "congestion_control = 'reno': must be 'auto', 'bbr' or 'cubic'"),
        ({"integrity": "none"}, "integrity = 'none': must be 'plain', 'checksum' or 'aead'"),
        ({"integrity": "aead"}, "integrity = 'aead': it needs certificate, key, authority; `prfaas certificates`"),
        ({"certificate": "a.pem", "key": "a.key"}, "authority is missing: certificate, key, authority go together"),
        ({"egress_bytes_per_s": -1}, "egress_bytes_per_s = -1.0: must be bytes per second from 0"),
        ({"egress_bytes_per_s": {"west": "fast"}}, r"egress_bytes_per_s\.west = 'fast': must be bytes per second"),
        ({"egress_bytes_per_s": {"8:00": 1e6}}, "egress_bytes_per_s: '8:00' must be a time of day, \"00:00\""),
        ({"egress_bytes_per_s": {"08:00": 0}}, "must be rates above 0, by time of day"),
        ({"egress_bytes_per_s": {"west": {}}}, r"egress_bytes_per_s\.west = {}: must be rates above 0"),
        ({"ssd_dir": "/ssd"}, "ssd_bytes = 0: must be 1048576 to"),
        ({"ssd_key": "boot"}, "ssd_key = 'boot': allowed only with ssd_dir, which is empty"),
        ({"ssd_bytes": 1 << 30}, "ssd_bytes = 1073741824: allowed only with ssd_dir, which is empty"),
        ({"block_size": 64, "chunk_tokens": 63}, "chunk_tokens = 63: less than a block, block_size = 64"),
        ({"block_size": 1024}, "chunk_tokens = 512: less than a block, block_size = 1024"),
        ({"picked_port": 70_000}, "picked_port = 70000: must be 0 to 65535"),
        ({"picked_leg_s": 0.0}, r"picked_leg_s = 0.0: must be 0.1 to"),
        (
            {"picked_port": 1, "engine": "sglang"},
            "picked_port = 1: engine 'sglang' has none: its servers are paired by rooms",
        ),
        ({"picked_port": 1, "picked_host": "10.0.0.1"}, "host = '10.0.0.1': other machines reach picked_port without"),
        ({"threads": True}, "threads = True: must be an integer"),
    ],
)
def test_key_value_and_what_is_allowed_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(NodeConfigError, match=message):
        node_config(TABLE | change)


def test_budgets_are_for_all_by_cluster_or_by_time_of_day() -> None:
    def budgets(value: Any) -> dict[str, Any]:
        return node_config(TABLE | {"egress_bytes_per_s": value}).budgets()

    day = DailyBudget(((8 * 3600.0, 5e6), (20.5 * 3600, 9e6)))
    assert node_config(TABLE).budgets() == {"*": None}
    assert budgets(5_000_000) == {"*": 5e6}
    assert budgets({"20:30": 9e6, "08:00": 5e6}) == {"*": day}
    assert budgets({"west": 1e6, "*": {"08:00": 5e6, "20:30": 9e6}, "south": 0}) == {
        "west": 1e6,
        "*": day,
        "south": None,
    }


def test_missing_keys_are_named() -> None:
    with pytest.raises(NodeConfigError, match="missing: cluster, cluster_kind, role, model"):
        node_config({"node_id": "n"})


def test_an_integer_serves_as_a_float() -> None:
    assert node_config(TABLE | {"lease_s": 5}).lease_s == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node", "not valid TOML"),
        ("[nod]\n", "unknown key 'nod' .did you mean 'node'"),
        ("", "has one table, .node.; it is missing"),
        ("node = 1", "has one table, .node.; it is missing"),
        ("[gateway]\nport = 1", "this is a gateway's file, for `prfaas gateway`"),
        ("[gateway]\n[[clusters]]", "this is a topology, for `prfaas up`"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    with pytest.raises(NodeConfigError, match=message):
        load_node_config(path)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    table = "".join(f"{key} = {value!r}\n" for key, value in TABLE.items())
    path.write_text(f"[node]\n{table}integrity = 'aead'\ncertificate = 'n.pem'\nkey = 'n.key'\nauthority = '/ca.pem'\n")
    config = load_node_config(path)
    assert config.identity is not None
    assert (config.identity.certificate, config.identity.authority) == (tmp_path / "n.pem", Path("/ca.pem"))
    assert config.model == str(tmp_path / "models/tiny")
