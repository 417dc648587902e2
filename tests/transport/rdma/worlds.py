"""Two ends whose NICs are on a made-up fabric, or on a real one."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from tests.transport.helpers import PATIENCE_S, PEER_TIMEOUT_S, SECRET, Memory
from transport.path.shm import ArenaSource
from transport.rdma.device import RdmaDevices
from transport.rdma.loopback import LoopbackDevice, LoopbackFabric
from transport.rdma.rails import RailReport
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import Landing, LandingResult
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, Push, PushResult, TransferClient
from transport.send.spec import TransferSpec, Via


@dataclass
class PinnedMemory(Memory):
    """Shuffled pages that are registered as a whole, as an agent's arena is."""

    page: int = 65_536
    before_segments: Callable[[], object] = lambda: None

    @property
    def source(self) -> ArenaSource:
        return ArenaSource("", memoryview(self.buffer), self._asked)

    def _asked(self, index: int) -> list[tuple[int, int]]:
        self.before_segments()
        return self.segments(index)


@dataclass
class RdmaDelivery:
    """One transfer and what becomes of it at both ends."""

    source: PinnedMemory
    target: PinnedMemory
    landing: Landing
    push: Push
    landed: threading.Event = field(default_factory=threading.Event)
    results: list[LandingResult] = field(default_factory=list)

    def wait(self, timeout_s: float = PATIENCE_S) -> PushResult:
        result = self.push.wait(timeout_s)
        assert result is not None, self.push.stats
        return result

    def landing_result(self, timeout_s: float = PATIENCE_S) -> LandingResult:
        assert self.landed.wait(timeout_s)
        return self.results[0]

    @property
    def equal(self) -> bool:
        return self.source.content() == self.target.content()


class RdmaWorld:
    """A sender with NICs a0, b0 and a receiver with NICs a1, b1; a and b are two fabrics."""

    def __init__(
        self,
        rails: Sequence[str],
        receiver_rails: Sequence[str] | None,
        options: ServerOptions,
        window_bytes: int,
        direct: bool,
    ) -> None:
        self.fabric = LoopbackFabric()
        far = rails if receiver_rails is None else receiver_rails
        self.near_nics = [self.fabric.device(f"{rail}0", fabric=rail) for rail in rails]
        self.far_nics = [self.fabric.device(f"{rail}1", fabric=rail) for rail in far]
        self.near, self.far = RdmaDevices(self.near_nics), RdmaDevices(self.far_nics, direct=direct)
        self.server = TransferServer(options=options_with(options, self.far))
        self.client = TransferClient(
            options=ClientOptions(
                rdma=self.near,
                integrity=options.integrity,
                identity=options.identity,
                window_bytes=window_bytes,
                peer_timeout_s=PEER_TIMEOUT_S,
            )
        )

    @property
    def nics(self) -> list[LoopbackDevice]:
        return [*self.near_nics, *self.far_nics]

    def deliver(
        self, sizes: Sequence[int], *, transfer_id: str = "t", secret: bytes = SECRET, ready: bool = True,
        register: bool = True, orphan_timeout_s: float = float("inf"), address: str | None = None,
        before_segments: Callable[[], object] = lambda: None,
    ) -> RdmaDelivery:  # fmt: skip
        source = PinnedMemory(sizes, fill=True, seed=1, before_segments=before_segments)
        target = PinnedMemory(sizes, seed=2)
        if register:
            self.far.register(memoryview(target.buffer))
        landed, results = threading.Event(), []

        def on_done(result: LandingResult) -> None:
            results.append(result)
            landed.set()

        landing = self.server.expect(
            transfer_id, SECRET, sizes, target, on_done=on_done, orphan_timeout_s=orphan_timeout_s
        )
        push = self.client.open(
            TransferSpec(address or self.server.address, transfer_id, secret, sizes, via=Via.RDMA), source.source
        )
        if ready:
            push.ready_all()
        return RdmaDelivery(source, target, landing, push, landed, results)

    def rail(self, local: str) -> RailReport:
        return next(rail for rail in self.client.rails() if rail.local == local)


def options_with(options: ServerOptions, devices: RdmaDevices) -> ServerOptions:
    return replace(options, rdma=devices)


@contextmanager
def rdma_world(
    rails: Sequence[str] = ("a", "b"),
    *,
    receiver_rails: Sequence[str] | None = None,
    options: ServerOptions | None = None,
    window_bytes: int = 64 << 20,
    direct: bool = False,
) -> Iterator[RdmaWorld]:
    """Whatever happened in it, no queue pair is left afterwards."""
    with ExitStack() as stack:
        world = RdmaWorld(rails, receiver_rails, options or ServerOptions(), window_bytes, direct)
        stack.callback(world.near.close)
        stack.callback(world.far.close)
        stack.enter_context(world.server)
        stack.enter_context(world.client)
        yield world
    assert [nic.open_queue_pairs for nic in world.nics] == [0] * len(world.nics)
    assert not world.fabric.queue_pairs
    assert not world.server.buffers_lent_bytes
