"""A ticket is the same value in a proto message, on the Unix socket and in `kv_transfer_params`."""

import msgspec

from transport.control.messages import TicketInfo
from transport.control.proto import node_pb2 as pb
from transport.control.tickets import ticket_info, ticket_message


def test_a_ticket_keeps_every_field() -> None:
    message = pb.Ticket(
        transfer_id="t",
        secret=b"\x00\xff",
        num_tokens=9,
        have_tokens=3,
        tokens_digest=b"d",
        endpoints=[pb.Endpoint(kind="shm", address="h:1", host_id="x"), pb.Endpoint(kind="tcp", address="h:1")],
        ttl_s=1.5,
        layout_fingerprint="f",
        node_id="n",
        cluster="c",
    )
    ticket = ticket_info(message)
    assert ticket == TicketInfo(
        transfer_id="t",
        secret=b"\x00\xff",
        num_tokens=9,
        have_tokens=3,
        tokens_digest=b"d",
        endpoints=(("shm", "h:1", "x"), ("tcp", "h:1", "")),
        ttl_s=1.5,
        layout_fingerprint="f",
        node_id="n",
        cluster="c",
    )
    assert msgspec.json.decode(msgspec.json.encode(ticket), type=TicketInfo) == ticket
    assert ticket_message(ticket) == message
