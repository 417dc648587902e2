"""What a PD node takes: prefixes in any role, decode reservations only as a decode node."""

from node.config import NodeConfig
from node.errors import NodeRefusal
from transport.control.proto import node_pb2 as pb


def admit(config: NodeConfig, request: pb.ReserveRequest) -> None:
    """Raises NodeRefusal("wrong_role") for a decode reservation on a prefill node."""
    if not request.prefix_only and config.role != "decode":
        raise NodeRefusal("wrong_role", f"{config.node_id} holds the role {config.role}")
