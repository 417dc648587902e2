"""The receiving end of a node's links: it expects transfers and says where peers may send them."""

from collections.abc import Callable, Sequence

from node.config import INTEGRITIES, NodeConfig
from node.errors import NodeRefusal
from node.tasks import on_loop
from node.transfer.reach import RDMA, SHM, TCP, PeerReach
from transport.control.proto import node_pb2 as pb
from transport.errors import Closed
from transport.path.tcp import TcpOptions
from transport.receive.options import ServerOptions
from transport.receive.registry import landing as landings
from transport.receive.server import TransferServer
from transport.wire.manifest import RangeViews
from transport.wire.sizes import RangeSizes


class ExpectedTransfer:
    """One transfer that is expected."""

    def __init__(self, server: TransferServer, landing: landings.Landing) -> None:
        self._server = server
        self._landing = landing

    @property
    def bytes_landed(self) -> int:
        """Verified bytes so far."""
        return self._landing.bytes_landed

    @property
    def bytes_total(self) -> int:
        """Bytes of the whole transfer."""
        return self._landing.bytes_total

    def readdress(self, sender: str) -> None:
        """Let only that sender go on, by its certificate."""
        self._server.readdress(self._landing, sender)

    def cancel(self, reason: str) -> None:
        """End it. Its callback runs when no thread writes into the pages any more."""
        self._server.cancel(self._landing.transfer_id, reason)


class PeerListener:
    """Receives from other nodes. Transport calls back from its own threads; callbacks run on the agent's loop."""

    def __init__(self, config: NodeConfig, reach: PeerReach) -> None:
        port = config.port("transfer")
        self.server = TransferServer(port.host, port.number, options=_options(config, reach))
        self._reach = reach
        self._advertise = config.transfer_advertise
        self.known_peers = config.known_peers()

    def start(self) -> None:
        """Bind the listener. Raises OSError."""
        self.server.start()

    def close(self) -> None:
        """End all landings and join all threads. Blocks; call it off the loop."""
        self.server.close()

    def endpoints(self) -> list[pb.Endpoint]:
        """Where peers may send to, best first."""
        host_id, fabrics = self._reach.host_id, " ".join(sorted(self._reach.fabrics))
        shm = [pb.Endpoint(kind=SHM, address=self.server.address, host_id=host_id)] if host_id else []
        rdma = [pb.Endpoint(kind=RDMA, address=self.server.address, host_id=fabrics)] if fabrics else []
        return [*shm, *rdma, pb.Endpoint(kind=TCP, address=self._advertise or self.server.address)]

    def expect(
        self,
        transfer_id: str,
        secret: bytes,
        sizes: Sequence[int] | RangeSizes,
        target: RangeViews,
        on_done: Callable[[landings.LandingResult], None],
        *,
        exact: bool = True,
        sender: str = "",
    ) -> ExpectedTransfer:
        """Announce a transfer whose range i goes into `target(i)`; `exact` refuses quantised bytes. Raises NodeRefusal.

        With a `sender`, CLUSTER/NAME of its certificate, others are refused.
        """
        try:
            landing = self.server.expect(
                transfer_id, secret, sizes, target, exact=exact, sender=sender, on_done=on_loop(on_done)
            )
        except Closed as exc:
            raise NodeRefusal("draining", "the node ends") from exc
        except ValueError as exc:
            raise NodeRefusal("bad_request", str(exc)) from exc
        return ExpectedTransfer(self.server, landing)

    @property
    def bytes_received(self) -> int:
        """Payload that arrived over all links."""
        return self.server.bytes_received


def _options(config: NodeConfig, reach: PeerReach) -> ServerOptions:
    return ServerOptions(
        integrity=INTEGRITIES[config.sealing],
        plain_from=frozenset(config.plain_clusters),
        identity=config.identity,
        guard=reach.guard,
        arena_dirs=reach.arena_dirs,
        codecs=config.codings().taken,
        tcp=TcpOptions(congestion=config.congestion_control),
        rdma=reach.rdma,
    )
