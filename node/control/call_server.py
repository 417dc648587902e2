"""Calls over kept connections: what gateways need for every request, without what gRPC takes for each call.

The same calls as of the gRPC face, which serves gateways without such a connection. A connection that ends takes what
it was waiting for with it; what it has been answered stays while its holder is there (see holders), or until its lease ends.
"""

import asyncio
import logging
import time
from collections import Counter
from functools import partial
from typing import Final, Protocol, cast

from google.protobuf.message import DecodeError

from node.control.call_listener import CallListener
from node.control.frames import FRAME_S, Frame, FrameRoom
from node.control.holders import ReservationHolders, checked_name
from node.control.rights import DENIED
from node.errors import NodeRefusal
from transport.control.calls import AGENT, CALLER, MAX_CALLS, CallBuffer, CallOutbox, keep_alive
from transport.control.messages import MessageError
from transport.control.proto import node_pb2 as pb
from transport.path.site import site_of
from transport.peers.guard import Guard
from transport.peers.name import of_tls, said_by
from transport.receive.few_lines import FewLines
from transport.wire.identity import Identity

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 20.0  # as for gRPC: a stranger holds a descriptor for so long
LONGEST_S: Final = 120.0  # of a call whose caller names no limit, or a longer one
MAX_CONNECTIONS: Final = 1024  # one per worker of a gateway; who gets none asks by gRPC
MAX_OF_ADDRESS: Final = 256
UNREAD_S: Final = 20.0  # a caller that takes none of its answers for so long is gone


class Called(Protocol):
    """Who answers."""

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        """Raises NodeRefusal."""
        ...

    def abort(self, request: pb.AbortRequest) -> pb.Done: ...


class CallServer:
    """Listens for gateways that keep a connection."""

    def __init__(
        self,
        called: Called,
        holders: ReservationHolders | None = None,
        *,
        handshake_s: float = HANDSHAKE_S,
        frame_s: float = FRAME_S,
        unread_s: float = UNREAD_S,
        of_address: int = MAX_OF_ADDRESS,
    ) -> None:
        """`holders` hears which callers are there."""
        self.ended: Counter[str] = Counter()  # connections that were ended here, by why
        self.room = FrameRoom(frame_s)
        self.unread_s = unread_s
        self.of_address = of_address
        self.called = called
        self.holders = ReservationHolders(time.monotonic) if holders is None else holders
        self.handshake_s = handshake_s
        self.guard: Guard | None = None
        self._connections: set[_Connection] = set()
        self._lines = FewLines(log)
        self._listener: CallListener | None = None

    def __len__(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int, identity: Identity | None = None, guard: Guard | None = None) -> int:
        """The port it listens on. Raises OSError.

        With an identity, callers must have a certificate whose name `guard` knows rights of; None: one of its own.
        """
        self.guard = guard or (identity.guard() if identity is not None else None)
        self._listener = CallListener(self._connection, self._refused, self._is_known, self.handshake_s)
        return self._listener.start(host, port, identity.mutual_context() if identity is not None else None)

    async def close(self, grace_s: float) -> None:
        """Takes no more calls; those under way have `grace_s` to be answered."""
        if self._listener is None:
            return
        self._listener.stop()
        under_way = {task for connection in self._connections for task in connection.tasks}
        if under_way:
            await asyncio.wait(under_way, timeout=grace_s)
        for connection in list(self._connections):
            connection.end()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._listener.close()

    def _connection(self) -> "_Connection":
        return _Connection(self, self._connections)

    def _is_known(self, site: str) -> bool:
        """Whether a caller from there has been let in, and is there still."""
        return any(site_of(connection.address) == site for connection in self._connections)

    def _refused(self, reason: str, address: str, detail: str) -> None:
        """A caller that is no connection yet: its handshake failed, or lost its place."""
        self.ended[reason] += 1
        now = asyncio.get_running_loop().time()
        self._lines.warning(now, "a kept connection of %s ended (%s): %s", address, reason, detail)


class _Connection(asyncio.Protocol):
    """One gateway's connection: a task per call that waits for something."""

    _transport: asyncio.Transport

    def __init__(self, server: CallServer, others: "set[_Connection]") -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self._server = server
        self._called = server.called
        self._holders = server.holders
        self._holder = ""  # who calls, once it has said so
        self._others = others
        self._buffer = CallBuffer(CALLER)
        self._frame: Frame | None = None  # that has begun and is not whole
        self._is_read = False  # our answers, by the other end
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not so by class
        self._outbox = CallOutbox(self._transport)
        self.address = (transport.get_extra_info("peername") or ("",))[0]
        self._others.add(self)
        self._is_read = True
        keep_alive(transport.get_extra_info("socket"))
        self._peer = of_tls(said_by(transport.get_extra_info("ssl_object")))
        if self._server.guard is not None:
            self._entry = self._server.guard.enter(self._peer, lambda why: self._abort(why, str(self._peer)))
        self._silence = asyncio.get_running_loop().call_later(self._server.handshake_s, self._unless_greeted)
        if len(self._others) > MAX_CONNECTIONS:
            self._abort("crowded", f"there are {MAX_CONNECTIONS}")
        elif sum(other.address == self.address for other in self._others) > self._server.of_address:
            self._abort("crowded_address", f"there are {self._server.of_address} of {self.address}")

    def _unless_greeted(self) -> None:
        if not self._buffer.greeted:
            self._abort("silent", "no greeting")

    def _abort(self, reason: str, detail: str) -> None:
        """Ends it, and says why where an operator can see it."""
        if self._transport.is_closing():
            return
        self._server.ended[reason] += 1
        log.warning("a kept connection of %s ended (%s): %s", self.address, reason, detail)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        if self._server.guard is not None:
            self._server.guard.leave(self._entry)
        self._silence.cancel()
        if self._unread is not None:
            self._unread.cancel()
        if self._frame is not None:
            self._frame.end()
            self._frame = None
        for task in self.tasks:
            task.cancel()
        if self._holder:
            self._holders.left(self._holder)

    def end(self) -> None:
        """Hangs up, once what has been said is sent."""
        for task in self.tasks:
            task.cancel()
        self._outbox.flush()
        self._transport.close()

    def pause_writing(self) -> None:
        self._is_read = False
        late = partial(self._abort, "unread", "it does not read its answers")
        self._unread = asyncio.get_running_loop().call_later(self._server.unread_s, late)
        self._read_on()

    def resume_writing(self) -> None:
        self._is_read = True
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._read_on()

    def _read_on(self) -> None:
        """A caller that does not read its answers, has too much under way or no room for its frame is not heard for as long."""
        if self._transport.is_closing():
            return
        if self._is_read and len(self.tasks) < MAX_CALLS and (self._frame is None or self._frame.has_room):
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        greeted = self._buffer.greeted
        try:
            bodies = self._buffer.feed(data)
            if self._buffer.greeted and not greeted:
                self._transport.write(AGENT)
            for body in bodies:
                self._heard(pb.Call.FromString(body))
        except (MessageError, DecodeError) as exc:
            self._abort("garbled", str(exc))
            return
        self._follow_frame(bool(bodies))

    def _follow_frame(self, is_another: bool) -> None:
        """The frame at the end of what has come, if it is not whole, has its memory and its time."""
        begun_bytes = self._buffer.begun_bytes
        if self._frame is not None and (is_another or not begun_bytes or self._frame.needs(begun_bytes)):
            self._frame.end()
            self._frame = None
        if self._frame is None and begun_bytes and not self._transport.is_closing():
            self._frame = Frame(self._server.room, self.address, begun_bytes, self._read_on, self._late)
            if not self._frame.has_room:
                self._read_on()

    def _late(self) -> None:
        if self._frame is not None and len(self.tasks) >= MAX_CALLS:  # it is we who do not read on
            self._frame.wait_again()
            return
        if self._frame is not None and not self._frame.has_room:
            self._abort("no_room", f"there was no memory for its frame for {self._server.room.frame_s} s")
            return
        self._abort("stalled", f"a frame was not whole after {self._server.room.frame_s} s")

    def _heard(self, call: pb.Call) -> None:
        asked, guard = call.WhichOneof("call"), self._server.guard
        if guard is not None and (why := guard.refusal(f"call.{asked}", self._peer, self.address)):
            self._refuse(call, DENIED, why)
            return
        match asked:
            case "reserve":
                task = asyncio.get_running_loop().create_task(self._reserve(call), name="reserve")
                self.tasks.add(task)
                task.add_done_callback(self._ended)
                if len(self.tasks) >= MAX_CALLS:
                    self._read_on()
            case "abort":
                self._say(pb.CallAnswer(id=call.id, done=self._called.abort(call.abort)))
            case "introduce":
                self._introduced(call)
            case _:  # of a later version
                self._refuse(call, "unimplemented", "no such call")

    def _introduced(self, call: pb.Call) -> None:
        try:
            name = checked_name(call.introduce.holder)
        except NodeRefusal as exc:
            self._refuse(call, exc.label, exc.detail)
            return
        if not name or self._holder:
            self._refuse(call, "bad_request", "a caller has one name")
            return
        self._holder = name
        self._holders.came(name)
        self._say(pb.CallAnswer(id=call.id, done=pb.Done(ok=True)))

    async def _reserve(self, call: pb.Call) -> None:
        try:
            # What is no time at all, NaN too, is no limit of the caller's.
            async with asyncio.timeout(call.timeout_s if 0 < call.timeout_s < LONGEST_S else LONGEST_S):
                ticket = await self._called.reserve(call.reserve)
        except NodeRefusal as exc:
            self._refuse(call, exc.label, str(exc))
        except TimeoutError:
            self._refuse(call, "timeout", "")
        except Exception:
            log.exception("reserve failed")
            self._refuse(call, "internal", "an error of the agent's own")
        else:
            if self._transport.is_closing():  # its id will never be known
                self._called.abort(pb.AbortRequest(transfer_id=ticket.transfer_id, reason="caller_gone"))
            self._say(pb.CallAnswer(id=call.id, ticket=ticket))

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if len(self.tasks) == MAX_CALLS - 1:
            self._read_on()

    def _refuse(self, call: pb.Call, reason: str, detail: str) -> None:
        self._say(pb.CallAnswer(id=call.id, refusal=pb.Refusal(reason=reason, detail=detail)))

    def _say(self, answer: pb.CallAnswer) -> None:
        self._outbox.say(answer.SerializeToString())
