import pytest

from node.config import NodeConfig
from node.errors import NodeRefusal
from prfaas_cluster.admission import admit
from transport.control.proto import node_pb2 as pb

CONFIG = NodeConfig(node_id="n", cluster="east", cluster_kind="prfaas", role="prefill", model="m")


def test_a_prefix_is_taken() -> None:
    admit(CONFIG, pb.ReserveRequest(num_tokens=64, prefix_only=True))


def test_a_decode_reservation_is_refused() -> None:
    with pytest.raises(NodeRefusal) as caught:
        admit(CONFIG, pb.ReserveRequest(num_tokens=64))
    assert caught.value.label == "wrong_role"
    assert "n belongs to a PrfaaS cluster" in str(caught.value)
