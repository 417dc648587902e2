"""Builders for transport tests."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from transport.receive.registry.landing import Landing, LandingResult
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, Push, PushResult, TransferClient
from transport.send.spec import TransferSpec

SECRET = b"one-time secret!"
PEER_TIMEOUT_S = 30.0  # of clients whose peers are there
PATIENCE_S = 60.0  # what must happen may take this long on a machine that is busy with other things


def wait_for(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def client_of(connections: int = 4, **options: object) -> TransferClient:
    options = {"peer_timeout_s": PEER_TIMEOUT_S, **options}
    return TransferClient(options=ClientOptions(connections=connections, **options))  # type: ignore[arg-type]


def random_bytes(size: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(size))


@dataclass
class Memory:
    """Ranges laid out in one buffer, each in pages of `page` bytes that lie in a shuffled order."""

    sizes: Sequence[int]
    page: int = 4096
    seed: int = 0
    fill: bool = False
    buffer: bytearray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        pages_of = [-(-size // self.page) for size in self.sizes]
        order = rng.permutation(sum(pages_of))
        ends = np.cumsum(pages_of)
        self._pages = [order[end - n : end].tolist() for end, n in zip(ends, pages_of, strict=True)]
        total = sum(pages_of) * self.page
        self.buffer = bytearray(rng.bytes(total)) if self.fill else bytearray(total)

    def segments(self, index: int) -> list[tuple[int, int]]:
        left = self.sizes[index]
        segments = []
        for page in self._pages[index]:
            segments.append((page * self.page, min(left, self.page)))
            left -= segments[-1][1]
        return segments

    def __call__(self, index: int) -> list[memoryview]:
        view = memoryview(self.buffer)
        return [view[start : start + length] for start, length in self.segments(index)]

    def content(self) -> list[bytes]:
        return [b"".join(self(i)) for i in range(len(self.sizes))]


@dataclass
class Delivery:
    """One transfer over real sockets: both memories, both handles, both results."""

    source: Memory
    target: Memory
    landing: Landing
    push: Push
    landed: threading.Event
    results: list[LandingResult]

    def wait(self, timeout_s: float = PATIENCE_S) -> tuple[PushResult | None, LandingResult | None]:
        pushed = self.push.wait(timeout_s)
        self.landed.wait(timeout_s)
        return pushed, self.results[0] if self.results else None

    @property
    def equal(self) -> bool:
        return self.source.content() == self.target.content()


def deliver(
    server: TransferServer,
    client: TransferClient,
    sizes: Sequence[int],
    *,
    transfer_id: str = "t",
    ready: bool = True,
    address: str | None = None,
    secret: bytes = SECRET,
    orphan_timeout_s: float = float("inf"),
    receiver: str = "",
) -> Delivery:
    source, target = Memory(sizes, fill=True, seed=1), Memory(sizes, seed=2)
    landed, results = threading.Event(), []

    def on_done(result: LandingResult) -> None:
        results.append(result)
        landed.set()

    landing = server.expect(transfer_id, SECRET, sizes, target, on_done=on_done, orphan_timeout_s=orphan_timeout_s)
    push = client.open(TransferSpec(address or server.address, transfer_id, secret, sizes, receiver=receiver), source)
    if ready:
        push.ready_all()
    return Delivery(source, target, landing, push, landed, results)
