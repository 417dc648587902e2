"""What a PrfaaS node takes: prefixes from other clusters, never a decode reservation."""

from node.config import NodeConfig
from node.errors import NodeRefusal
from transport.control.proto import node_pb2 as pb


def admit(config: NodeConfig, request: pb.ReserveRequest) -> None:
    """Raises NodeRefusal("wrong_role") for a reservation that would end in a decode."""
    if not request.prefix_only:
        raise NodeRefusal(
            "wrong_role", f"{config.node_id} belongs to a PrfaaS cluster: it prefills, it does not decode"
        )
