"""The kept connection to one agent, over which go the calls that every request makes.

It is opened when the agent says where, and again when a call finds it gone. Until then calls go by gRPC: an older agent, or a
firewall in between, costs only CPU. A call fails as it would by gRPC, with the same labels.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

from google.protobuf.message import DecodeError

from gateway.errors import AgentCallFailed
from transport.control.calls import AGENT, CALLER, MAX_ANSWER_BYTES, MAX_CALLS, CallBuffer, CallOutbox, keep_alive
from transport.control.messages import MessageError
from transport.control.proto import node_pb2 as pb
from transport.peers.name import PeerCertificate, of_tls, said_by
from transport.wire.identity import Identity

log = logging.getLogger("prfaas.gateway.calls")

BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)  # between attempts to connect
MAX_UNREAD_BYTES: Final = 8 << 20  # of calls that an agent does not take; the next ones go by gRPC
OWED_S: Final = 120.0  # a connection that stalled may take to say what it owes: agents bound their calls by as much


class CallConnection(asyncio.Protocol):
    """One connection, from its opening to its end. Answers find their calls by number."""

    def __init__(self, address: str, holder: str = "") -> None:
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._address = address
        self._holder = holder
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outbox: CallOutbox
        self._buffer = CallBuffer(AGENT, MAX_ANSWER_BYTES)
        self._asked: dict[int, tuple[asyncio.Future[pb.CallAnswer], asyncio.TimerHandle]] = {}
        self._number = 0
        self._heard_until = 0  # the newest call that was asked when something was last heard
        self._end = ("unreachable", "the kept connection broke")
        self._is_retired = False
        self.is_read = True  # what it says, by the agent
        self._owed: set[int] = set()  # calls that are not awaited any more, of a connection that stalled

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def is_open(self) -> bool:
        """Whether more can be asked."""
        return (
            self._transport is not None
            and self._buffer.greeted
            and not self._is_retired
            and not self._transport.is_closing()
        )

    def peer(self) -> PeerCertificate:
        """Who the agent is by its certificate."""
        assert self._transport is not None
        return of_tls(said_by(self._transport.get_extra_info("ssl_object")))

    def ask(self, call: pb.Call, timeout_s: float) -> "asyncio.Future[pb.CallAnswer]":
        """The answer to `call`, which gets its number here, or AgentCallFailed: `timeout`, `unreachable`."""
        assert self._transport is not None
        self._number = number = self._number + 1
        call.id, call.timeout_s = number, timeout_s
        answer: asyncio.Future[pb.CallAnswer] = self._loop.create_future()
        self._asked[number] = answer, self._loop.call_later(timeout_s, self.give_up, number, timeout_s)
        self._outbox.say(call.SerializeToString())
        return answer

    def retire(self) -> None:
        """Hangs up once nothing waits for an answer any more."""
        self._is_retired = True
        self._unless_needed()

    def close(self) -> None:
        """Hangs up; what waits for an answer gets none."""
        self._end = ("cancelled", "the gateway hangs up")
        if self._transport is not None:
            self._outbox.flush()
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not so by class
        keep_alive(transport.get_extra_info("socket"))
        self._transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES)
        self._transport.write(CALLER)
        self._outbox = CallOutbox(self._transport)
        if self._holder:
            self._outbox.say(pb.Call(introduce=pb.Introduce(holder=self._holder)).SerializeToString())

    def data_received(self, data: bytes) -> None:
        try:
            bodies = self._buffer.feed(data)
            if self._buffer.greeted and not self.greeted.done():
                self.greeted.set_result(None)
            for body in bodies:
                self._heard(pb.CallAnswer.FromString(body))
        except (MessageError, DecodeError) as error:
            self._hang_up("garbled", str(error))
        self._heard_until = self._number
        self._unless_needed()

    def pause_writing(self) -> None:
        self.is_read = False

    def resume_writing(self) -> None:
        self.is_read = True

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(exc or ConnectionError("closed before it was greeted"))
            self.greeted.exception()  # seen, if it is not awaited any more
        self._fail_all(AgentCallFailed(self._address, *self._end))

    def _heard(self, answer: pb.CallAnswer) -> None:
        self._owed.discard(answer.id)
        waiting = self._asked.pop(answer.id, None)
        if waiting is not None:
            waiting[1].cancel()
            if not waiting[0].done():
                waiting[0].set_result(answer)
                return
        if answer.HasField("ticket"):  # of a reservation that is not awaited any more
            self._give_back(answer.ticket.transfer_id)

    def _give_back(self, transfer_id: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            call = pb.Call(abort=pb.AbortRequest(transfer_id=transfer_id, reason="given_up"))
            self._outbox.say(call.SerializeToString())

    def give_up(self, number: int, timeout_s: float) -> None:
        """The answer to call `number`, which has had `timeout_s`, is not awaited any more."""
        answer, deadline = self._asked.pop(number)
        deadline.cancel()
        if not answer.done():
            answer.set_exception(AgentCallFailed(self._address, "timeout", f"no answer for {timeout_s} s"))
        if number > self._heard_until:  # nothing at all has come since: the others need not wait as long
            self._stalled(number, f"the kept connection was silent for {timeout_s} s")
        self._unless_needed()

    def _stalled(self, number: int, detail: str) -> None:
        """Asks nothing more, and hears for a while what it is owed: an agent that goes on answers what it had been asked."""
        log.warning("the kept connection to %s is given up (timeout): %s", self._address, detail)
        self._is_retired = True
        self._owed = {number, *self._asked}
        self._fail_all(AgentCallFailed(self._address, "timeout", detail))
        if self._transport is not None:
            self._loop.call_later(OWED_S, self._transport.abort)

    def _fail_all(self, error: AgentCallFailed) -> None:
        asked, self._asked = self._asked, {}
        for answer, deadline in asked.values():
            deadline.cancel()
            if not answer.done():
                answer.set_exception(error)

    def _unless_needed(self) -> None:
        if self._is_retired and not self._asked and not self._owed and self._transport is not None:
            self._outbox.flush()
            self._transport.close()

    def _hang_up(self, reason: str, detail: str) -> None:
        log.warning("the kept connection to %s is given up (%s): %s", self._address, reason, detail)
        self._end = (reason, detail)
        if self._transport is not None:
            self._transport.abort()


class PersistentCalls:
    """Keeps a connection to the agent at `address`, once that has said at which port it takes them."""

    def __init__(
        self,
        address: str,
        connect_s: float,
        identity: Identity | None,
        name: str,
        holder: str = "",
        refusal: Callable[[PeerCertificate], str] = lambda shown: "",
    ) -> None:
        """`name` is what the agent's certificate must carry if that is not the host of its address; `holder` names the caller.

        `refusal` says why the holder of a certificate is no agent.
        """
        self.refusal = refusal
        self._address = address
        self._host = address.rpartition(":")[0].strip("[]")
        self._connect_s = connect_s
        self._holder = holder
        # gRPC looks at the name in the server's certificate whatever the files say; so do we.
        self.certified_name = name or self._host
        self._identity = replace(identity, peer_name=self.certified_name) if identity is not None else None
        self._port = 0
        self._connection: CallConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.failures = 0  # to connect, since there was a connection
        self._not_before = 0.0

    def offered(self, port: int) -> None:
        """The agent says where it takes calls; 0: nowhere. What is under way to another port comes to its end."""
        if port != self._port:
            self._port, self.failures, self._not_before = port, 0, 0.0
            if self._connection is not None:
                self._connection.retire()
                self._connection = None
        self._connect_soon()

    def renew(self) -> None:
        """Connects anew, with the certificate as it is now. What is under way comes to its end."""
        if self._connection is not None:
            self._connection.retire()
            self._connection = None
        self._connect_soon()

    def connection(self) -> CallConnection | str:
        """The connection if it can be used, else why not: `not_offered`, `not_connected` or `full`."""
        connection = self._connection
        if connection is not None and connection.is_open:
            return connection if len(connection) < MAX_CALLS and connection.is_read else "full"
        if not self._port:
            return "not_offered"
        self._connect_soon()
        return "not_connected"

    async def close(self) -> None:
        """Hangs up."""
        self._port = 0
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._connection is not None:
            self._connection.close()

    def _connect_soon(self) -> None:
        """Begins an attempt, unless there is a connection, an attempt, or one has failed just now."""
        loop = asyncio.get_running_loop()
        is_open = self._connection is not None and self._connection.is_open
        if not self._port or is_open or self._connecting is not None or loop.time() < self._not_before:
            return
        self._connecting = loop.create_task(self._connect(self._port), name="connect calls")
        self._connecting.add_done_callback(self._ended)

    async def _connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        connection = CallConnection(self._address, self._holder)
        try:
            async with asyncio.timeout(self._connect_s):
                await loop.create_connection(
                    lambda: connection,
                    self._host,
                    port,
                    ssl=self._identity.client_context() if self._identity is not None else None,
                    server_hostname=self.certified_name if self._identity is not None else None,
                )
                if self._identity is not None and (why := self.refusal(connection.peer())):
                    raise ConnectionError(why)
                await connection.greeted
        except (OSError, ValueError) as error:
            connection.close()
            pause_s = BACKOFF_S[min(self.failures, len(BACKOFF_S) - 1)]
            if not self.failures:
                log.warning("no kept connection to %s, port %d: %s", self._address, port, str(error) or "timeout")
            self.failures, self._not_before = self.failures + 1, loop.time() + pause_s
        except BaseException:
            connection.close()
            raise
        else:
            self._connection, self.failures = connection, 0
            if port != self._port:  # it has been told of another meanwhile
                self._connection.retire()

    def _ended(self, attempt: "asyncio.Task[None]") -> None:
        self._connecting = None
        if not attempt.cancelled() and (error := attempt.exception()) is not None:
            log.error("a kept connection to %s failed in an unforeseen way", self._address, exc_info=error)
