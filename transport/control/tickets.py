"""Constants and conversions that both ends of node.proto share, beside its messages."""

from typing import Final

from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb

MAX_CONTROL_BYTES: Final = 256 << 20  # a snapshot of 8M blocks; hashes are 32 bytes
REASON_KEY: Final = "prfaas-reason"  # trailing metadata of a refusal: the label to count it under


def ticket_info(ticket: pb.Ticket) -> TicketInfo:
    """The message as a value."""
    return TicketInfo(
        transfer_id=ticket.transfer_id,
        secret=ticket.secret,
        num_tokens=ticket.num_tokens,
        have_tokens=ticket.have_tokens,
        tokens_digest=ticket.tokens_digest,
        endpoints=tuple((each.kind, each.address, each.host_id) for each in ticket.endpoints),
        ttl_s=ticket.ttl_s,
        layout_fingerprint=ticket.layout_fingerprint,
        node_id=ticket.node_id,
        cluster=ticket.cluster,
    )


def ticket_message(ticket: TicketInfo) -> pb.Ticket:
    """The value as a message."""
    return pb.Ticket(
        transfer_id=ticket.transfer_id,
        secret=ticket.secret,
        num_tokens=ticket.num_tokens,
        have_tokens=ticket.have_tokens,
        tokens_digest=ticket.tokens_digest,
        endpoints=[pb.Endpoint(kind=kind, address=at, host_id=host) for kind, at, host in ticket.endpoints],
        ttl_s=ticket.ttl_s,
        layout_fingerprint=ticket.layout_fingerprint,
        node_id=ticket.node_id,
        cluster=ticket.cluster,
    )
