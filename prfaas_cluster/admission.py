"""What a PrfaaS node takes: prefill legs, prefixes from other clusters, never a decode reservation."""

from node.errors import NodeRefusal
from node.role import RoleState
from transport.control.proto import node_pb2 as pb


def admit(standing: RoleState, request: pb.ReserveRequest) -> None:
    """Raises NodeRefusal("wrong_role") for a reservation that would end in a decode."""
    if not request.prefix_only:
        raise NodeRefusal(
            "wrong_role", f"{standing.node_id} belongs to a PrfaaS cluster: it prefills and does not decode"
        )


def admit_leg(standing: RoleState) -> None:
    """Takes every prefill leg: it is what the node is there for."""
