import pytest

from node.errors import NodeRefusal
from node.role import RoleState
from pd_cluster.admission import admit, admit_leg
from transport.control.proto import node_pb2 as pb


def standing(role: str, *, is_converting: bool = False) -> RoleState:
    return RoleState(node_id="n", role=role, is_converting=is_converting)


@pytest.mark.parametrize("is_converting", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_prefix_is_taken_in_any_role_and_between_them(role: str, is_converting: bool) -> None:
    admit(standing(role, is_converting=is_converting), pb.ReserveRequest(num_tokens=64, prefix_only=True))


def test_what_a_role_takes() -> None:
    admit(standing("decode"), pb.ReserveRequest(num_tokens=64))
    admit_leg(standing("prefill"))


def test_a_prefill_node_decodes_nothing() -> None:
    with pytest.raises(NodeRefusal) as caught:
        admit(standing("prefill"), pb.ReserveRequest(num_tokens=64))
    assert (caught.value.label, caught.value.detail) == ("wrong_role", "n holds the role prefill")


def test_a_leg_that_comes_late_is_computed_all_the_same() -> None:
    admit_leg(standing("decode"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_between_roles_a_node_does_neither(role: str) -> None:
    between = standing(role, is_converting=True)
    with pytest.raises(NodeRefusal, match="converting"):
        admit(between, pb.ReserveRequest(num_tokens=64))
    with pytest.raises(NodeRefusal, match="converting"):
        admit_leg(between)
