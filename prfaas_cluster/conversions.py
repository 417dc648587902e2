"""The role of a PrfaaS node, which never changes."""

from collections import Counter
from collections.abc import Callable

from node.errors import NodeRefusal
from node.role import Convertible, Standing
from transport.control.proto import node_pb2 as pb


class NoConversions:
    """Refuses every command."""

    def __init__(self, node: Convertible, now: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self.standing = Standing(node_id=node.config.node_id, role=node.config.role)

    async def convert(self, request: pb.ConvertRequest) -> pb.Conversion:
        """Raises NodeRefusal."""
        raise NodeRefusal("cannot_convert", f"{self.standing.node_id} belongs to a PrfaaS cluster: it only prefills")

    def report(self) -> pb.Conversion:
        """No command was ever taken up."""
        return pb.Conversion(role=self.standing.role, phase=pb.CONVERSION_PHASE_STEADY)
