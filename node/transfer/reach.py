"""How a node and its peers reach each other beside TCP: shared memory on one host, RDMA on one fabric."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.config import NodeConfig
from node.errors import NodeConfigError
from node.kvcache.arena import SHM_DIR
from transport.peers.guard import Guard
from transport.rdma.device import RdmaDevices, RdmaError
from transport.rdma.topology import fabrics_of, matrix
from transport.rdma.verbs import RdmaOptions, open_devices
from transport.wire.checksum import Integrity

log = logging.getLogger(__name__)

SHM, RDMA, TCP = "shm", "rdma", "tcp"  # kinds of endpoints, on the wire
SHM_ARENAS: Final = (str(SHM_DIR),)


class PeerReach:
    """What both ends of a node's links share. It holds the RDMA devices: close both ends first, then this."""

    def __init__(
        self, cluster: str, *, use_shm: bool, rdma: RdmaDevices | None = None, guard: Guard | None = None
    ) -> None:
        """`guard` knows the rights of peers with certificates."""
        self.cluster = cluster
        self.guard = guard
        self.rdma = rdma
        self.fabrics = fabrics_of(rdma.nics) if rdma is not None else frozenset[str]()
        self.host_id = host_id() if use_shm else ""

    @property
    def arena_dirs(self) -> tuple[str, ...]:
        """Directories whose arenas this node may fetch from; none without shared memory."""
        return SHM_ARENAS if self.host_id else ()

    def open_memory(self, arena: memoryview) -> None:
        """Register the arena with the node's NICs, to send from it; in direct mode peers write into it, too."""
        if self.rdma is None:
            return
        try:
            self.rdma.register(arena)
        except RdmaError as exc:
            log.error("no RDMA with an arena of %d bytes: %s", arena.nbytes, exc)

    @property
    def is_open_to_peers(self) -> bool:
        """Whether NICs of peers reach the whole arena."""
        return self.rdma is not None and self.rdma.direct

    def close(self) -> None:
        """Close the RDMA devices. Blocks; call it off the loop."""
        if self.rdma is not None:
            self.rdma.close()


def rdma_of(
    config: NodeConfig, *, open_devices: Callable[[RdmaOptions], RdmaDevices] = open_devices
) -> RdmaDevices | None:
    """The NICs that a node uses. Raises NodeConfigError where the configuration demands RDMA and this machine has no device."""
    # By default, encryption that was asked for is not given up for speed.
    if config.transport == "tcp" or (
        config.transport == "auto" and config.sealing_with(config.cluster) is Integrity.AEAD
    ):
        return None
    try:
        devices = open_devices(RdmaOptions(devices=config.rdma_devices, direct=config.rdma_direct))
    except RdmaError as exc:
        if config.transport == "rdma" or config.rdma_devices:
            raise NodeConfigError(f"transport = {config.transport!r}: RDMA is not possible here: {exc}") from exc
        log.info("no RDMA: %s", exc)
        return None
    for location, (preferred, secondary) in matrix(devices.nics).items():
        log.info("RDMA %s preferred=%s secondary=%s", location, ",".join(preferred), ",".join(secondary))
    if devices.direct:
        log.warning(
            "rdma_direct: every node of cluster %s that sends here can write anywhere in our arena", config.cluster
        )
    return devices


def reach_of(config: NodeConfig) -> PeerReach:
    """What this node has of it. Raises NodeConfigError, and OSError for certificates that cannot be used."""
    return PeerReach(
        config.cluster,
        use_shm=config.transport == "auto" and os.access(SHM_DIR, os.W_OK),
        rdma=rdma_of(config),
        guard=config.identity.guard() if config.identity is not None else None,
    )


def host_id() -> str:
    """Equal for processes that can map each other's /dev/shm files: same boot, same user, same mount."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mount = os.stat(SHM_DIR)
    return hashlib.sha256(f"{boot} {os.getuid()} {mount.st_dev}".encode()).hexdigest()[:32]
