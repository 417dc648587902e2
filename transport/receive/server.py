"""The receiving end: one listener for all peers and all transfers.

Threads: one greets strangers, one keeps time, one per connection that has shown a secret reads chunks straight into the
memory of their landing. What they share is `SharedLandings`.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from transport.coding.choice import CodecAccounts
from transport.errors import Closed
from transport.path.tcp import format_address, listen, peer_of, shut
from transport.peers.name import PeerCertificate
from transport.receive.connection.greeter import Acceptor, GreetedVisitor
from transport.receive.connection.inlet import ReceiverThread
from transport.receive.few_lines import FewLines
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import Landing, OnLanded
from transport.receive.registry.seats import Origin
from transport.receive.registry.segments import ReadRequest, RemoteSegment, write_id
from transport.receive.registry.shared import SharedLandings
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.frames import Accept, Code, Open, Refuse
from transport.wire.greeting import NONCE_BYTES
from transport.wire.manifest import RangeViews
from transport.wire.session import SESSION_LIFE_S, Session, Sessions
from transport.wire.sizes import RangeSizes

log = logging.getLogger(__name__)

SESSION_OVER: Final = PeerCertificate(None, 0, "its session has ended")
FOREVER: Final = float("inf")
KEEPER_PAUSE_S: Final = 1.0  # after an error of its own


class TransferServer:
    """Receives transfers that were announced with expect(); refuses all others.

    Callbacks come from transport threads, must not block, and may call back into the server.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        options: ServerOptions | None = None,
        on_read: Callable[[ReadRequest], None] | None = None,
        listen: Callable[[str, int], socket.socket] = listen,
    ) -> None:
        self.options = options or ServerOptions()
        self._listen = listen
        self._bind = (host, port)
        self._listener: socket.socket | None = None
        self._serves_reads = on_read is not None
        self._shared = SharedLandings(
            on_read,
            self.options.max_connections,
            self.options.buffer_bytes,
            self.options.guard,
            spare_buffer_bytes=self.options.spare_buffer_bytes,
            plain_from=self.options.plain_from,
        )
        self._sessions = Sessions(SESSION_LIFE_S)
        self._threads: list[threading.Thread] = []
        self._greeter: Acceptor | None = None
        self._few_lines = FewLines(log)
        self.address = ""

    def start(self) -> "TransferServer":
        """Binds and listens; `address` is set afterwards. Raises OSError."""
        self._listener = self._listen(*self._bind)
        host, port = self._listener.getsockname()[:2]
        self.address = format_address(host, port)
        options = self.options
        self._greeter = Acceptor(
            self, self._listener, options.identity, options.tcp.connect_timeout_s, options.limits, options.guard
        )
        self._threads = [self._greeter, threading.Thread(target=self._keep_time, name=f"kv-server-{port}", daemon=True)]
        for thread in self._threads:
            thread.start()
        return self

    def expect(
        self,
        transfer_id: str,
        secret: bytes,
        sizes: Iterable[int] | RangeSizes,
        targets: RangeViews,
        *,
        on_done: OnLanded | None = None,
        deadline_s: float = FOREVER,
        orphan_timeout_s: float = FOREVER,
        exact: bool = True,
        sender: str = "",
    ) -> Landing:
        """Announces a transfer: range i, of `sizes[i]` bytes, goes into the writable byte views `targets(i)`.

        `on_done(LandingResult)` is called once, when nothing writes into the targets any more. `deadline_s` counts from
        now; `orphan_timeout_s` from the moment when the last connection of a sender that had begun goes away. `exact`
        refuses quantised bytes even where `ServerOptions.codecs` allows them. `sender` is the only one, as CLUSTER/NAME
        of its certificate, where connections have sessions; empty: any that may send.
        """
        shared = self._shared
        with shared.changed:
            if shared.closing:
                raise Closed("the server is closed")
            landing = shared.landings.expect(
                transfer_id,
                secret,
                sizes,
                targets,
                on_done=on_done,
                deadline=time.monotonic() + deadline_s,
                orphan_timeout_s=orphan_timeout_s,
                exact=exact,
                sender=sender,
            )
            shared.changed.notify_all()
        return landing

    def register_segment(
        self, name: str, memory: memoryview, secret: bytes, *, readable: bool = False, writable: bool = True
    ) -> None:
        """Opens bytes to one-sided writes, or reads, by peers that know the secret (see batch)."""
        if ":" in name or "@" in name:
            raise ValueError(f"segment name {name!r} must contain neither a colon nor an @")
        if writable and memory.readonly:
            raise ValueError(f"segment {name!r} is writable, its memory is not")
        if readable and not self._serves_reads:
            raise ValueError(f"segment {name!r} is readable, but nothing here serves reads")
        with self._shared.lock:
            self._shared.landings.segments.register(name, RemoteSegment(memory, secret, readable, writable))

    def unregister_segment(self, name: str) -> None:
        """Refuses further access and ends the writes under way; returns when nothing writes there any more (within a
        few ticks of 10 ms). Not to be called from a callback. Idempotent.
        """
        shared, prefix = self._shared, write_id(name, "")
        with shared.lock:
            shared.landings.segments.unregister(name)
            writes = [i for i in shared.landings.active_ids() if i.startswith(prefix)]
        for transfer_id in writes:
            self.cancel(transfer_id, "the segment is no longer registered")
        with shared.changed:
            shared.changed.wait_for(lambda: shared.closing or not shared.landings.is_settling(prefix))

    def is_registered(self, segment: RemoteSegment) -> bool:
        """Whether others may still read or write there."""
        with self._shared.lock:
            return segment in self._shared.landings.segments

    def await_sender(self, transfer_id: str) -> None:
        """From now on `orphan_timeout_s` runs for a landing, unless its sender has come already."""
        with self._shared.changed:
            self._shared.landings.await_sender(transfer_id, time.monotonic())
            self._shared.changed.notify_all()

    def readdress(self, landing: Landing, sender: str) -> None:
        """Another sender takes over, as in `expect`."""
        with self._shared.lock:
            landing.sender = sender

    def cancel(self, transfer_id: str, reason: str = "") -> None:
        """Ends a landing and has its sender told; never blocks. Its on_done comes within a few ticks (10 ms).
        Idempotent.
        """
        self._shared.cancel(transfer_id, reason)

    @property
    def counters(self) -> Counter[str]:
        """Events so far: "landed", "failed:<code>", "refused:<code>", "rejected:<code>", "sessions", …"""
        return self._shared.counters

    @property
    def codecs(self) -> CodecAccounts:
        """Decoded bytes so far, by codec; the receiver does not know the ranges' labels."""
        with self._shared.lock:
            accounts = CodecAccounts()
            accounts.merge(self._shared.decoded)
        return accounts

    @property
    def bytes_received(self) -> int:
        """Payload bytes of all landings so far, repeated ones included."""
        return self._shared.received_bytes

    @property
    def buffers_lent_bytes(self) -> int:
        """Memory of buffers that connections have at present."""
        return self._shared.buffers.lent_bytes

    @property
    def num_connections(self) -> int:
        """Connections of admitted senders, and of peers that have shown no secret yet."""
        return self._shared.num_readers + (self._greeter.num_visitors if self._greeter is not None else 0)

    def close(self) -> None:
        """Ends all landings and connections, and joins every thread. Idempotent."""
        readers = self._shared.close()
        if self._greeter is not None:
            self._greeter.stop()
        if self._listener is not None:
            shut(self._listener)
        for thread in self._threads:
            thread.join()
        for reader in readers:
            reader.join()
        if self._listener is not None:
            self._listener.close()
        self._shared.settle()

    def __enter__(self) -> "TransferServer":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _keep_time(self) -> None:
        shared = self._shared
        while not shared.closing:
            try:
                shared.keep_deadlines()
            except Exception:
                log.exception("an error of the keeper of deadlines")
                self.count("internal_errors")
                with shared.changed:
                    shared.changed.wait_for(lambda: shared.closing, KEEPER_PAUSE_S)

    # for strangers: they have a greeter, whose host this is

    def arrive(self) -> int | Code:
        return self._shared.arrive()

    def receiver(self) -> Connection:
        options = self.options
        return Connection(
            ConnectionRole.RECEIVER,
            integrity=options.integrity,
            weaker=options.weaker,
            nonce=os.urandom(NONCE_BYTES),
            now=time.monotonic(),
            max_chunk_bytes=options.max_chunk_bytes,
            dead_after_s=options.tcp.dead_after_s,
            session_secret=self._secret_of,
            codecs=options.codecs,
        )

    def open(self, who: int, frame: Open, transcript: bytes) -> Accept | Refuse:
        return self._shared.open(who, frame, transcript)

    def admit(self, who: int, sock: socket.socket, connection: Connection, begun: GreetedVisitor) -> Code | None:
        inlet = ReceiverThread(self._shared, self.options, sock, who, connection, begun)
        refusal = self._shared.enter(who, inlet, Origin(peer_of(sock).rpartition(":")[0], begun.frame.transfer_id))
        if refusal is not None:
            return refusal
        try:
            inlet.start()
        except BaseException:
            self._shared.left(who)
            raise
        return None

    def gone(self, who: int) -> None:
        self._shared.gone(who)

    def count(self, label: str) -> None:
        self._shared.count(label)

    def _secret_of(self, session_id: bytes) -> bytes | None:
        with self._shared.lock:
            return self._sessions.secret_of(session_id, time.monotonic())

    def new_session(self, peer: PeerCertificate | None = None) -> Session:
        with self._shared.lock:
            self._shared.landings.counters["sessions"] += 1
            return self._sessions.grant(time.monotonic(), peer)

    def introduced(self, who: int, address: str, session_id: bytes) -> None:
        with self._shared.lock:
            if session_id:
                self._shared.introduce(who, self._sessions.peer_of(session_id) or SESSION_OVER, address)

    def refused(self, code: str, who: str, detail: str) -> None:
        """A peer was turned away before it could say which transfer it has."""
        with self._shared.lock:
            self._few_lines.warning(time.monotonic(), "refused a sender at %s: %s", who, detail)
            self._shared.landings.counters[f"refused:{code}"] += 1
