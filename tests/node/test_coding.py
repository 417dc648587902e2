"""The [node.coding] table."""

from typing import Any

import pytest

from node.coding import check_installed, coding_of
from node.config import node_config
from node.errors import NodeConfigError
from transport.coding.choice import CodingPolicy, Compression, Quantisation
from transport.coding.codec import Codec
from transport.control.settings import SettingsError

TABLE: dict[str, Any] = {"node_id": "n", "cluster": "c", "cluster_kind": "pd", "role": "decode", "model": "m"}


def test_by_default_nothing_is_coded() -> None:
    coding = node_config(TABLE).codings()
    assert coding.off
    assert not coding.taken & (Codec.INT8 | Codec.FP8)


def test_a_whole_table() -> None:
    coding = coding_of(
        {
            "accept_quantised": True,
            "full_attention": {"compression": "auto", "quantisation": "int8"},
            "linear_state": {"compression": "zstd"},
        }
    )
    assert coding.full_attention == CodingPolicy(compression=Compression.AUTO, quantisation=Quantisation.INT8)
    assert coding.linear_state == CodingPolicy(compression=Compression.ZSTD)
    assert coding.sliding_window == CodingPolicy()
    assert Codec.INT8 & coding.taken


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"coding": 3}, "must be a table"),
        ({"coding": {"full": {}}}, "unknown key 'full'"),
        ({"coding": {"accept_quantised": "yes"}}, "true or false"),
        ({"coding": {"reuse_quantised": True}}, "only with accept_quantised"),
        ({"coding": {"max_cores": 0}}, r"max_cores = 0(\.0)?: must be above 0 and finite"),
        ({"coding": {"max_cores": "all"}}, "max_cores"),
        ({"coding": {"full_attention": "zstd"}}, "must be a table"),
        ({"coding": {"full_attention": {"codec": "zstd"}}}, "unknown key 'codec'"),
        (
            {"coding": {"full_attention": {"compression": "lz4"}}},
            "compression = 'lz4': must be 'off', 'auto' or 'zstd'",
        ),
        ({"coding": {"linear_state": {"quantisation": 8}}}, "quantisation = 8: must be 'off', 'int8' or 'fp8'"),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, Any], says: str) -> None:
    with pytest.raises(NodeConfigError, match=says):
        node_config(TABLE | table)


def test_compression_needs_its_extra() -> None:
    policy = CodingPolicy(compression=Compression.AUTO)
    with pytest.raises(SettingsError, match="zstd extra"):
        check_installed("full_attention", policy, has_zstd=False)
    check_installed("full_attention", policy, has_zstd=True)
    check_installed("full_attention", CodingPolicy(), has_zstd=False)
