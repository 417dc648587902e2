"""What a PD node takes: prefixes in any role, decode reservations as a decode node, legs unless it changes its role."""

from node.errors import NodeRefusal
from node.role import RoleState
from transport.control.proto import node_pb2 as pb


def admit(standing: RoleState, request: pb.ReserveRequest) -> None:
    """Raises NodeRefusal("wrong_role") for a decode reservation on a prefill node, ("converting") on one that changes."""
    if request.prefix_only:
        return
    admit_leg(standing)
    if standing.role != "decode":
        raise NodeRefusal("wrong_role", f"{standing.node_id} holds the role {standing.role}")


def admit_leg(standing: RoleState) -> None:
    """The same for a prefill leg. One that comes late to what is a decode node by now is computed: it can be."""
    if standing.is_converting:
        raise NodeRefusal("converting", f"{standing.node_id} changes its role")
