"""A sender and a receiver joined in memory and in virtual time: no sockets, no threads, no waiting.

Both ends are the real ones (Connection, LaneScheduler, Landings); only what carries the bytes is made up. `wire` may
change what travels: split it, lose it, repeat it, swap it.
"""

import heapq
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

from transport.errors import TransportError
from transport.receive.registry.landing import Claim, Landing, Notices, OnLanded, Rivals
from transport.receive.registry.landings import Landings
from transport.send.schedule.lanes import LaneScheduler, LaneTransfer
from transport.send.spec import Urgency
from transport.wire.checksum import DIGEST_BYTES, Digest, Integrity, digest, transfer_seed
from transport.wire.connection import Connection, ConnectionRole, ProtocolState
from transport.wire.frames import MAX_CHUNK_BYTES, Abort, Ack, Chunk, Code, Frame, Nack, Open, Welcome
from transport.wire.manifest import Manifest, Outbox, RangeViews, proof_of

Wire = Callable[[int, bytes], Iterable[bytes]]  # (lane, what is sent) -> what arrives
_MAX_VIRTUAL_S = 3600.0


class Loopback:
    """`num_lanes` connections that share one link of `bytes_per_s` each way, with `latency_s` one way."""

    def __init__(
        self,
        *,
        num_lanes: int = 2,
        chunk_bytes: int = 64 << 10,
        bytes_per_s: float = 1e9,
        latency_s: float = 1e-3,
        reconnect_s: float = 0.05,
        eager_bytes: int = 0,
        to_receiver: Wire = lambda lane, data: (data,),
        to_sender: Wire = lambda lane, data: (data,),
    ) -> None:
        self.now = 0.0
        self.scheduler = LaneScheduler(chunk_bytes=chunk_bytes)
        self.scheduler.eager_bytes = eager_bytes
        self.landings = Landings()
        self.chunk_bytes = chunk_bytes
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.reconnect_s = reconnect_s
        self.wires = {ConnectionRole.SENDER: to_receiver, ConnectionRole.RECEIVER: to_sender}
        self.free_at = {ConnectionRole.SENDER: 0.0, ConnectionRole.RECEIVER: 0.0}
        self.errors: list[str] = []
        self.sources: dict[int, RangeViews] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = count()
        self._slots = count()
        self._lane_ids = count()
        self.lanes: dict[int, _Lane] = {}
        for _ in range(num_lanes):
            self._connect()

    def expect(
        self, transfer_id: str, secret: bytes, sizes: Iterable[int], targets: RangeViews, *,
        on_done: OnLanded | None = None, deadline: float = float("inf"), orphan_timeout_s: float = float("inf"),
    ) -> Landing:  # fmt: skip
        return self.landings.expect(
            transfer_id, secret, sizes, targets, on_done=on_done, deadline=deadline, orphan_timeout_s=orphan_timeout_s
        )

    def open(
        self, transfer_id: str, secret: bytes, sizes: Iterable[int], source: RangeViews, *,
        urgency: Urgency = Urgency.NORMAL, deadline: float = float("inf"), tenant: str = "", weight: float = 1.0,
    ) -> LaneTransfer:  # fmt: skip
        transfer = LaneTransfer(
            slot=next(self._slots),
            transfer_id=transfer_id,
            secret=secret,
            outbox=Outbox(Manifest(sizes)),
            urgency=urgency,
            deadline=deadline,
            tenant=tenant,
            weight=weight,
        )
        self.sources[transfer.slot] = source
        self.scheduler.add(transfer)
        self.pump()
        return transfer

    def ready(self, transfer: LaneTransfer, indexes: Iterable[int | range]) -> None:
        self.scheduler.ready(transfer, indexes)
        self.pump()

    def abort(self, transfer: LaneTransfer, *, leave: bool = False) -> None:
        self.scheduler.abort(transfer, "", leave=leave)
        self.pump()

    def cancel(self, transfer_id: str) -> None:
        for who, frame in self.landings.cancel(transfer_id, "", self.now):
            self.lanes[who].say(frame)

    def cut(self, lane_id: int, error: str = "cut") -> None:
        """Ends a connection at both ends; another takes its place after `reconnect_s`."""
        lane = self.lanes.pop(lane_id, None)
        if lane is None:
            return
        self.errors.append(error)
        self.scheduler.lane_down(lane_id)
        self.landings.disconnected(lane_id, self.now)
        self.at(self.now + self.reconnect_s, self._connect)
        self.pump()

    def run(self, until: float = _MAX_VIRTUAL_S, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass until `until`, or until `stop()`; nothing but pings happens once all is delivered."""
        while self._events and self._events[0][0] <= until and not stop():
            self.now, _, action = heapq.heappop(self._events)
            self.scheduler.expire(self.now)
            for who, frame in self.landings.expire(self.now):
                self.lanes[who].say(frame)
            action()
            self._settle()
        if not stop() and until < _MAX_VIRTUAL_S:
            self.now = max(self.now, until)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._seq), action))

    def pump(self) -> None:
        for lane in list(self.lanes.values()):
            lane.pump()

    def transmit(self, role: ConnectionRole, size: int) -> float:
        """Puts `size` bytes on the link; returns when they arrive."""
        self.free_at[role] = max(self.free_at[role], self.now) + size / self.bytes_per_s
        return self.free_at[role] + self.latency_s

    def _connect(self) -> None:
        lane_id = next(self._lane_ids)
        self.landings.connected(lane_id)
        self.lanes[lane_id] = _Lane(self, lane_id)
        self.lanes[lane_id].pump()

    def _settle(self) -> None:
        self.scheduler.take_settled()
        for landing in self.landings.take_settled():
            landing.tell_owner()


class _Lane:
    """One connection: both its ends, and the bytes between them."""

    def __init__(self, link: Loopback, lane_id: int) -> None:
        self.link = link
        self.lane_id = lane_id
        self.ends = {
            role: Connection(
                role,
                integrity=Integrity.CHECKSUM,
                nonce=role.name[:1].encode() * 8 + lane_id.to_bytes(8, "little"),
                now=link.now,
                max_chunk_bytes=link.chunk_bytes if role is ConnectionRole.SENDER else MAX_CHUNK_BYTES,
            )
            for role in ConnectionRole
        }
        self._seeds: dict[ConnectionRole, dict[int, int]] = {role: {} for role in ConnectionRole}
        self._claim: Claim | None = None
        self._chunk: Chunk | None = None
        self._views: list[memoryview] = []
        self._trailer = bytearray(DIGEST_BYTES)
        for role in ConnectionRole:
            self._arm(role)

    def say(self, frame: Frame) -> None:
        self._put(ConnectionRole.RECEIVER, self.ends[ConnectionRole.RECEIVER].send(frame))

    def pump(self) -> None:
        """Sends what both ends have to say, and the next chunks if the link is free for them."""
        for role, end in self.ends.items():
            self._put(role, end.data_to_send())
        sender = self.ends[ConnectionRole.SENDER]
        if sender.state is not ProtocolState.OPEN or self.link.lanes.get(self.lane_id) is not self:
            return
        while self.link.free_at[ConnectionRole.SENDER] <= self.link.now and self._send_batch(sender):
            pass

    def _send_batch(self, sender: Connection) -> bool:
        batch = self.link.scheduler.next_batch(self.lane_id)
        for notice in batch.notices:
            self._put(ConnectionRole.SENDER, sender.send(notice))
        for transfer in batch.opens:
            self._put(ConnectionRole.SENDER, sender.send(self._opening(transfer, sender)))
        for piece in batch.pieces:
            slot, start, stop = piece.transfer.slot, piece.start, piece.stop
            views = piece.transfer.manifest.views(self.link.sources[slot], start, stop)
            running = Digest(self._seeds[ConnectionRole.SENDER][slot], start)
            running.update(views)
            header = sender.chunk_header(slot, start, stop - start)
            self._put(ConnectionRole.SENDER, b"".join([header, *views, running.trailer()]))
        if batch.pieces:
            self.link.at(self.link.free_at[ConnectionRole.SENDER], self.link.pump)
        return bool(batch)

    def _opening(self, transfer: LaneTransfer, sender: Connection) -> Open:
        manifest = transfer.manifest
        self._seeds[ConnectionRole.SENDER][transfer.slot] = transfer_seed(transfer.transfer_id, sender.transcript)
        return Open(
            slot=transfer.slot,
            transfer_id=transfer.transfer_id,
            proof=proof_of(transfer.secret, transfer.transfer_id, manifest.digest, sender.transcript),
            total_bytes=manifest.total_bytes,
            num_ranges=manifest.num_ranges,
            manifest_digest=manifest.digest,
        )

    def _put(self, role: ConnectionRole, data: bytes) -> None:
        peer = ConnectionRole.RECEIVER if role is ConnectionRole.SENDER else ConnectionRole.SENDER
        for part in self.link.wires[role](self.lane_id, data) if data else ():
            self.link.at(self.link.transmit(role, len(part)), partial(self._arrive, peer, part))

    def _arrive(self, role: ConnectionRole, data: bytes) -> None:
        if self.link.lanes.get(self.lane_id) is not self:
            return
        end, view = self.ends[role], memoryview(data)
        try:
            while view:
                view = view[end.receive_data(view, self.link.now) :]
                self._drain(role, end)
        except TransportError as exc:
            self.link.cut(self.lane_id, f"{role.name}: {exc}")
            return
        self.link.pump()

    def _drain(self, role: ConnectionRole, end: Connection) -> None:
        while True:
            if end.payload_left:
                if not end.payload_buffered:
                    return
                self._take_payload(end)
                continue
            if self._chunk is not None:
                self._finish_chunk()
            if (frame := end.next_event()) is None:
                return
            self._handle(role, end, frame)

    def _handle(self, role: ConnectionRole, end: Connection, frame: Frame) -> None:
        link, landings = self.link, self.link.landings
        match frame:
            case Welcome():
                link.scheduler.lane_up(self.lane_id)
            case Open():
                self._seeds[ConnectionRole.RECEIVER][frame.slot] = transfer_seed(frame.transfer_id, end.transcript)
                self.say(landings.open(self.lane_id, frame, end.transcript, link.now))
            case Abort():
                self._tell(landings.abort(self.lane_id, frame, link.now))
            case Chunk():
                self._begin_chunk(frame)
            case _ if role is ConnectionRole.SENDER:
                link.scheduler.on_frame(self.lane_id, frame)

    def _tell(self, notices: Notices) -> None:
        for who, frame in notices:
            self.link.lanes[who].say(frame)

    # the receiver's chunk in progress

    def _begin_chunk(self, chunk: Chunk) -> None:
        while isinstance(claim := self._ask(chunk), Rivals):
            for who in claim.who:
                self.link.cut(who, "rival")
        self._claim, self._chunk = claim, chunk
        views = claim.views if claim is not None else [memoryview(bytearray(chunk.length))]
        self._views = [*views, memoryview(self._trailer)]

    def _ask(self, chunk: Chunk) -> Claim | Rivals | None:
        return self.link.landings.begin(
            self.lane_id, chunk.slot, chunk.offset, chunk.stop, lambda size: memoryview(bytearray(size)), self.link.now
        )

    def _take_payload(self, end: Connection) -> None:
        if self._claim is not None and self._claim.void:
            self.link.landings.withdraw(self._claim)
            self._claim, self._views = None, [memoryview(bytearray(end.payload_left))]
        size = end.take_payload(self._views[0])
        self._views[0] = self._views[0][size:]
        if not self._views[0]:
            self._views.pop(0)

    def _finish_chunk(self) -> None:
        claim, chunk = self._claim, self._chunk
        self._claim = self._chunk = None
        if chunk is None:
            return
        reply: Ack | Nack | None = None
        if claim is not None:
            seed = self._seeds[ConnectionRole.RECEIVER][chunk.slot]
            verified = digest(claim.views, seed, chunk.offset) == int.from_bytes(self._trailer, "little")
            reply = self.link.landings.finish(claim, verified, self.link.now)
        self.say(reply or Nack(slot=chunk.slot, offset=chunk.offset, length=chunk.length, code=Code.CANCELLED))

    def _arm(self, role: ConnectionRole) -> None:
        self.link.at(self.ends[role].next_timer(), lambda: self._on_timer(role))

    def _on_timer(self, role: ConnectionRole) -> None:
        if self.link.lanes.get(self.lane_id) is not self:
            return
        try:
            if self.link.now >= self.ends[role].next_timer():
                self.ends[role].on_timer(self.link.now)
        except TransportError as exc:
            self.link.cut(self.lane_id, f"{role.name}: {exc}")
            return
        self._put(role, self.ends[role].data_to_send())
        self._arm(role)
