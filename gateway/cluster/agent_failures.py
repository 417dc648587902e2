"""What agents refuse, and what keeps calls from them, as one error of ours with the label it is counted under."""

from typing import Final

import grpc
import grpc.aio

from gateway.errors import AgentCallFailed
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import REASON_KEY

REASONS: Final = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "no_capacity",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.FAILED_PRECONDITION: "not_ready",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
}
# What gRPC says of a node whose certificate is not accepted; of ours, the node's side tells nothing but a closed socket.
NOT_WHO_WE_MEANT: Final = ("handshake failed", "Hostname Verification Check failed", "CERTIFICATE_VERIFY_FAILED")


def unless_refused(answer: pb.CallAnswer, address: str) -> pb.CallAnswer:
    """The answer over a kept connection. Raises AgentCallFailed."""
    if answer.HasField("refusal"):
        raise AgentCallFailed(address, answer.refusal.reason, answer.refusal.detail)
    return answer


def node_error(address: str, error: grpc.aio.AioRpcError) -> AgentCallFailed:
    """The foreign error as ours, with the label it is counted under."""
    code = error.code()
    labels = [str(value) for key, value in error.trailing_metadata() or () if key == REASON_KEY]
    details = error.details() or ""
    if not labels and any(sign in details for sign in NOT_WHO_WE_MEANT):
        labels = ["identity"]
    return AgentCallFailed(address, labels[0] if labels else REASONS.get(code, code.name.lower()), details)
