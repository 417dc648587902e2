"""A role that never changes."""

from collections import Counter

from node.config import NodeConfig
from node.errors import NodeRefusal
from node.role import RoleState
from transport.control.proto import node_pb2 as pb


class FixedRole:
    """Refuses every command to change it; `why` says of the node why it cannot."""

    def __init__(self, config: NodeConfig, why: str) -> None:
        self.counts: Counter[str] = Counter()
        self.standing = RoleState(node_id=config.node_id, role=config.role)
        self._why = why

    async def convert(self, request: pb.ConvertRequest) -> pb.Conversion:
        """Raises NodeRefusal."""
        raise NodeRefusal("cannot_convert", f"{self.standing.node_id} {self._why}")

    def report(self) -> pb.Conversion:
        """No command was ever taken up."""
        return pb.Conversion(role=self.standing.role, phase=pb.CONVERSION_PHASE_STEADY)
