"""A PrfaaS node's engine prefills. What lands here are prefixes for its cache, which no engine claims."""

from collections import Counter
from typing import Final

from hybrid_cache.cache.reservation import Reservation
from node.errors import NodeRefusal
from node.transfer.incoming import IncomingTransfers
from node.transfer.job_replies import Reply
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb

WHY: Final = "a PrfaaS cluster prefills, it does not decode"


class NoDecodes:
    """Refuses reservations for decode, and every claim: an engine that asks for one was told to decode."""

    expects_decodes = False

    def __init__(self, incoming: IncomingTransfers) -> None:
        self.refused: Counter[str] = Counter()
        self.jobs: Counter[tuple[str, str]] = Counter()
        self.loaded_tokens = 0

    async def reserve(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """Raises NodeRefusal."""
        raise NodeRefusal("wrong_role", WHY)

    def claim(self, message: m.ClaimLanding, owner: object, reply: Reply) -> None:
        """Answer with Refused."""
        self.refused["wrong_role"] += 1
        reply(m.Refused(job=message.job, reason="wrong_role", detail=WHY))

    def end(self, message: m.EndJob, owner: object) -> None:
        """Nothing was lent."""

    def engine_gone(self, owner: object) -> None:
        """Nothing was lent."""
