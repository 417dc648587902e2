import pytest

from node.config import NodeConfig
from node.errors import NodeRefusal
from pd_cluster.admission import admit
from transport.control.proto import node_pb2 as pb


def config(role: str) -> NodeConfig:
    return NodeConfig(node_id="n", cluster="west", cluster_kind="pd", role=role, model="m")


@pytest.mark.parametrize(("role", "prefix_only"), [("decode", False), ("decode", True), ("prefill", True)])
def test_what_a_role_takes(role: str, prefix_only: bool) -> None:
    admit(config(role), pb.ReserveRequest(num_tokens=64, prefix_only=prefix_only))


def test_a_prefill_node_decodes_nothing() -> None:
    with pytest.raises(NodeRefusal) as caught:
        admit(config("prefill"), pb.ReserveRequest(num_tokens=64))
    assert (caught.value.label, caught.value.detail) == ("wrong_role", "n holds the role prefill")
