"""One connection to a receiver."""

import socket

from transport.coding.budget import CodingBudget
from transport.path.governor import Governor
from transport.path.link import LinkMonitor
from transport.path.pacing import EgressBudget
from transport.send.lane.coder import LaneCoder, PeerCoding
from transport.send.lane.link_keeper import LinkKeeper
from transport.send.lane.stream import Stream
from transport.send.schedule.lanes import LaneScheduler, LaneTransfer
from transport.send.schedule.transfers import Transfers
from transport.send.spec import Via
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.frames import Abort
from transport.wire.manifest import Manifest, Outbox


class NoLanes:
    def wake_for_work(self) -> None:
        pass

    def wake_connected(self) -> None:
        pass


class Lane:
    key = 0
    idle = False


def stream_over(sock: socket.socket) -> Stream:
    monitor = LinkMonitor("nobody")
    transfers = Transfers(LaneScheduler(chunk_bytes=1 << 20), monitor, NoLanes())
    link = LinkKeeper("nobody", Via.TCP, monitor, Governor(1, 1), EgressBudget(), transfers, adaptive=False)
    sender, receiver = (
        Connection(role, integrity=Integrity.CHECKSUM, nonce=b"n" * 16, now=0.0, max_chunk_bytes=1 << 20)
        for role in (ConnectionRole.SENDER, ConnectionRole.RECEIVER)
    )
    receiver.receive_data(memoryview(sender.data_to_send()), 0.0)
    receiver.next_event()
    sender.receive_data(memoryview(receiver.data_to_send()), 0.0)
    sender.next_event()
    return Stream(
        sock,
        sender,
        Lane(),
        transfers=transfers,
        link=link,
        coder=LaneCoder(PeerCoding(transfers.lock, CodingBudget()), 1 << 20),
        integrity=Integrity.CHECKSUM,
        session=None,
        on_frame=lambda _: None,
    )


def test_nothing_is_kept_of_transfers_that_are_over() -> None:
    near, far = socket.socketpair()
    with near, far:
        stream = stream_over(near)
        for slot in range(20):
            stream.opening(LaneTransfer(slot=slot, transfer_id=str(slot), secret=b"s", outbox=Outbox(Manifest([10]))))
        assert stream.num_open == 20
        for slot in range(19):
            stream.forget(Abort(slot=slot, leave=True))
        assert stream.num_open == 1
