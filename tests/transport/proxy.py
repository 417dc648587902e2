"""A TCP relay between a sender and a receiver that can cut, stall and slow down single connections."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from math import inf

from transport.path.tcp import format_address, parse_address


class Proxy:
    """Relays to `upstream`; `bytes_per_s` limits each connection's forward direction.

    About `passes` bytes go forward in all, and the rest stays on its way until a test raises that. So a test that waits for
    the middle of a transfer finds it there, however late it looks.
    """

    def __init__(self, upstream: str, bytes_per_s: float | None = None, *, passes: float = inf) -> None:
        self.upstream = upstream
        self.bytes_per_s = bytes_per_s
        self.passes = passes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname()[:2])
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.forwarded: list[int] = []
        self.stalled: set[int] = set()
        self.slow: dict[int, float] = {}
        self.is_dead = False
        self._is_held = False
        self._closing = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for index in range(len(self.pairs)):
            self.cut(index)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for pair in self.pairs:
            for sock in pair:
                sock.close()

    def cut(self, index: int) -> None:
        """Ends a connection hard, in both directions."""
        for sock in self.pairs[index]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def fail(self) -> None:
        """Nothing gets through any more, until `mend`: connections are cut, and new ones closed as they come."""
        self.is_dead = True
        for index in range(len(self.pairs)):
            self.cut(index)

    def mend(self) -> None:
        self.is_dead = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing passes forward meanwhile, so that what is sent stays on its way."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @property
    def total(self) -> int:
        return sum(self.forwarded)

    def wait_for(self, size: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.total < size:
            assert time.monotonic() < deadline, f"only {self.total} of {size} bytes passed"
            time.sleep(0.002)

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.is_dead:
                near.close()
                continue
            try:
                far = socket.create_connection(parse_address(self.upstream), timeout=60)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            index = len(self.pairs)
            self.pairs.append((near, far))
            self.forwarded.append(0)
            for source, sink, forward in ((near, far, True), (far, near, False)):
                thread = threading.Thread(target=self._relay, args=(index, source, sink, forward), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _stands_still(self) -> bool:
        return self._is_held or self.total >= self.passes

    def _forwarded(self, data: memoryview) -> memoryview:
        """What becomes of bytes on their way."""
        return data

    def _relay(self, index: int, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        buffer = memoryview(bytearray(1 << 16))
        try:
            while size := source.recv_into(buffer):
                while (index in self.stalled or (forward and self._stands_still())) and not self._closing:
                    time.sleep(0.01)
                sink.sendall(self._forwarded(buffer[:size]) if forward else buffer[:size])
                if forward:
                    self.forwarded[index] += size
                    rate = self.slow.get(index, self.bytes_per_s)
                    if rate:
                        time.sleep(size / rate)
        except OSError:
            pass
        self.cut(index)


class Forger(Proxy):
    """Changes one bit of the bytes `at` these places of all that passes forward."""

    def __init__(self, upstream: str, at: list[int]) -> None:
        self._at = at
        self._passed = 0
        super().__init__(upstream)

    def _forwarded(self, data: memoryview) -> memoryview:
        start, self._passed = self._passed, self._passed + len(data)
        for place in self._at:
            if start <= place < self._passed:
                data[place - start] ^= 1
        return data
