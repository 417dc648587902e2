"""Makes reservations at a server's own agent, by its control address: here no gateway does."""

from typing import Final

import grpc
import grpc.aio

from engine.errors import TransferError
from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.control.proto.node_pb2_grpc import NodeAgentStub
from transport.control.tickets import REASON_KEY, ticket_info

ANSWER_TIMEOUT_S: Final = 10.0


class AgentControl:
    """Calls of one agent, without certificates. All methods belong to one event loop."""

    def __init__(self, address: str, ttl_s: float) -> None:
        """`ttl_s`: how long a reservation may go without progress; the agent's lease at most."""
        self._address = address
        self._ttl_s = ttl_s
        self._stub: NodeAgentStub | None = None  # its channel belongs to the loop that first calls

    async def reserve(self, request_id: str, num_tokens: int, digest: bytes) -> TicketInfo:
        """A ticket for so many uncached tokens. Raises TransferError."""
        request = pb.ReserveRequest(
            request_id=request_id, num_tokens=num_tokens, tokens_digest=digest, ttl_s=self._ttl_s
        )
        try:
            return ticket_info(await self._calls().Reserve(request, timeout=ANSWER_TIMEOUT_S))
        except grpc.aio.AioRpcError as exc:
            label = dict(exc.trailing_metadata() or ()).get(REASON_KEY, exc.code().name.lower())
            raise TransferError(str(label), f"the agent at {self._address}: {exc.details()}") from exc

    async def abort(self, transfer_id: str) -> None:
        """Gives a reservation back. An agent that does not answer gives it back itself, when its lease is over."""
        try:
            await self._calls().Abort(
                pb.AbortRequest(transfer_id=transfer_id, reason="given_up"), timeout=ANSWER_TIMEOUT_S
            )
        except grpc.aio.AioRpcError:
            return

    def _calls(self) -> NodeAgentStub:
        if self._stub is None:
            self._stub = NodeAgentStub(grpc.aio.insecure_channel(self._address))  # type: ignore[no-untyped-call]
        return self._stub
