import pytest

from node.errors import NodeRefusal
from node.role import RoleState
from prfaas_cluster.admission import admit, admit_leg
from transport.control.proto import node_pb2 as pb

STANDING = RoleState(node_id="n", role="prefill")


def test_a_prefix_is_taken() -> None:
    admit(STANDING, pb.ReserveRequest(num_tokens=64, prefix_only=True))


def test_a_decode_reservation_is_refused() -> None:
    with pytest.raises(NodeRefusal) as caught:
        admit(STANDING, pb.ReserveRequest(num_tokens=64))
    assert caught.value.label == "wrong_role"
    assert "n belongs to a PrfaaS cluster" in str(caught.value)


def test_a_prefill_leg_is_taken() -> None:
    admit_leg(STANDING)
