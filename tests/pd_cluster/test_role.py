import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.errors import NodeRefusal
from pd_cluster.converter import RoleConverter
from pd_cluster.role import PD
from tests.node.running import config
from transport.control.proto import node_pb2 as pb


def conversions(tmp_path: Path, **fields: Any) -> Any:
    node: Any = SimpleNamespace(config=config(tmp_path, role="decode", cluster_kind="pd", **fields))
    return PD.conversions(node, lambda: 0.0)


def test_a_server_that_was_started_for_one_role_keeps_it(tmp_path: Path) -> None:
    fixed = conversions(tmp_path, engine="sglang")
    with pytest.raises(NodeRefusal, match="'sglang', which is started for one role") as refusal:
        asyncio.run(fixed.convert(pb.ConvertRequest(epoch=1, role="prefill")))
    assert refusal.value.label == "cannot_convert"
    assert (fixed.standing.role, fixed.report().role) == ("decode", "decode")


def test_other_engines_take_either(tmp_path: Path) -> None:
    assert isinstance(conversions(tmp_path), RoleConverter)
