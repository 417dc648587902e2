"""RDMA through pyverbs (Debian's python3-pyverbs): the one module that imports it, and only when it is used.

Facts that shaped it, each seen with pyverbs 44:
- REMOTE_WRITE must be in the attributes that the QP's constructor gets; it does RESET -> INIT.
- A memory region does not hold the buffer; its registrant keeps it.
- Calls that wait for events hold the interpreter lock: completions are polled.
- Retry counts of 7 mean "for ever" on some devices, so a dead peer would never be noticed.
"""

import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transport.rdma.device import (
    PROOF,
    RECEIVE_DEPTH,
    SEND_DEPTH,
    Device,
    Keys,
    QueuePair,
    QueuePairEnd,
    RdmaDevices,
    RdmaError,
    WorkCompletion,
    random_packet_number,
)
from transport.rdma.rails import Posting, RailWrite
from transport.rdma.topology import MAX_NICS, Nic, node_of_device

log = logging.getLogger(__name__)

SYS_CLASS: Final = Path("/sys/class/infiniband")
SIOCGIFNETMASK: Final = 0x891B
POLL_BATCH: Final = 32
SILENCE_S: Final = 2.0  # of a NIC that should have given up: a busy machine is late to hear of it
MTUS: Final = (256, 512, 1024, 2048, 4096)  # in the order of enum ibv_mtu, from 1
SCRATCH_BYTES: Final = 4096  # pyverbs wants a scatter-gather entry even where no bytes come or go


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaOptions:
    """`devices` to use (empty: all), and how long a NIC tries before it gives a rail up.

    The NIC sends a packet again after 4.096 us x 2^`timeout_exponent` without acknowledgement, `retries` times: 0.4 s
    in all by default (devices may take up to four times as long). In `direct` mode peers write into all registered memory.
    """

    devices: tuple[str, ...] = ()
    direct: bool = False
    timeout_exponent: int = 14
    retries: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.retries <= 6:
            raise ValueError(f"retries {self.retries}: 1 to 6")
        if not 8 <= self.timeout_exponent <= 22:
            raise ValueError(f"timeout_exponent {self.timeout_exponent}: 8 to 22")

    @property
    def gives_up_within_s(self) -> float:
        """The InfiniBand specification lets a NIC wait for up to four times what it was told, each time."""
        return 4 * 4.096e-6 * (1 << self.timeout_exponent) * (self.retries + 1)


def open_devices(options: RdmaOptions | None = None) -> RdmaDevices:
    """All usable ports. Raises RdmaError, which says why there are no ports."""
    options = options or RdmaOptions()
    verbs = _Verbs()
    found = verbs.device_names()
    missing = [name for name in options.devices if name not in found]
    if missing:
        raise RdmaError(f"no RDMA device {', '.join(missing)}; there are: {', '.join(found) or 'none'}")
    devices: list[Device] = []
    reasons: list[str] = []
    for name in options.devices or found:
        try:
            devices.append(VerbsDevice(verbs, name, options))
        except RdmaError as exc:
            reasons.append(f"{name}: {exc}")
    if not devices:
        raise RdmaError("; ".join(reasons) or "this machine has no RDMA device")
    for surplus in devices[MAX_NICS:]:
        reasons.append(f"{surplus.nic.name}: more than {MAX_NICS}")
        surplus.close()
    for reason in reasons:
        log.warning("RDMA device not used: %s", reason)
    return RdmaDevices(devices[:MAX_NICS], direct=options.direct)


class _Verbs:
    """The parts of pyverbs that are used here. Raises RdmaError where it is not installed."""

    def __init__(self) -> None:
        try:
            from pyverbs import addr, cq, device, enums, mr, pd, qp, wr
            from pyverbs.pyverbs_error import PyverbsError
        except ImportError as exc:
            raise RdmaError(f"pyverbs is not installed for this Python ({exc})") from exc
        self.addr, self.cq, self.device, self.enums = addr, cq, device, enums
        self.mr, self.pd, self.qp, self.wr = mr, pd, qp, wr
        self.error: type[Exception] = PyverbsError
        self.status_names = {
            getattr(enums, name): name.removeprefix("IBV_WC_").lower()
            for name in dir(enums)
            if name.startswith("IBV_WC_") and name.endswith("ERR")
        }
        self.closed_to_peers: int = enums.IBV_ACCESS_LOCAL_WRITE
        self.open_to_peers: int = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE

    def device_names(self) -> list[str]:
        with self.errors():
            return sorted(device.name.decode() for device in self.device.get_device_list())

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except (self.error, OSError, ValueError, OverflowError) as exc:  # the latter two: what a peer has told
            raise RdmaError(str(exc)) from exc


class VerbsDevice:
    """The first port of a device: one context, one protection domain, the memory registered there."""

    def __init__(self, verbs: _Verbs, name: str, options: RdmaOptions, port: int = 1) -> None:
        self.verbs, self.options, self.name, self.port = verbs, options, name, port
        self._regions: dict[int, Any] = {}  # by local key
        with verbs.errors():
            self.context: Any = verbs.device.Context(name=name)
        try:
            with verbs.errors():
                if not self.active():
                    raise RdmaError(f"port {port} is not active")
                self.gid_index, self.gid, fabric = self._place()
                self.nic = Nic(name=name, fabric=fabric, numa_node=node_of_device(SYS_CLASS, name))
                self.domain = verbs.pd.PD(self.context)
                self.scratch = verbs.mr.MR(self.domain, SCRATCH_BYTES, verbs.closed_to_peers)
        except BaseException:
            self.context.close()
            raise

    @property
    def silent_after_s(self) -> float:
        return self.options.gives_up_within_s + SILENCE_S

    def active(self) -> bool:
        with self.verbs.errors():
            state: int = self.context.query_port(self.port).state
            return bool(state == self.verbs.enums.IBV_PORT_ACTIVE)

    @property
    def mtu(self) -> int:
        """The path's MTU in bytes."""
        with self.verbs.errors():
            return 128 << int(self.context.query_port(self.port).active_mtu)

    def register(self, address: int, length: int, *, open_to_peers: bool) -> Keys:
        access = self.verbs.open_to_peers if open_to_peers else self.verbs.closed_to_peers
        with self.verbs.errors():
            region = self.verbs.mr.MR(self.domain, length, access, address=address)
        self._regions[region.lkey] = region
        return Keys(region.lkey, region.rkey)

    def deregister(self, keys: Keys) -> None:
        _close(self._regions.pop(keys.local))

    def queue_pair(self) -> QueuePair:
        return VerbsQueuePair(self, self.domain, self.scratch, self.verbs.closed_to_peers)

    def direct_queue_pair(self) -> QueuePair:
        return VerbsQueuePair(self, self.domain, self.scratch, self.verbs.open_to_peers)

    def buffer_queue_pair(self, address: int, length: int) -> tuple[QueuePair, int]:
        """In a protection domain of its own: its far end reaches what is registered there, and no key opens that to
        another queue pair.
        """
        verbs = self.verbs
        own: list[Any] = []
        try:
            with verbs.errors():
                own.append(domain := verbs.pd.PD(self.context))
                own.append(region := verbs.mr.MR(domain, length, verbs.open_to_peers, address=address))
            return VerbsQueuePair(self, domain, region, verbs.open_to_peers, own=own), region.rkey
        except BaseException:
            for part in reversed(own):
                _close(part)
            raise

    def close(self) -> None:
        for region in self._regions.values():
            _close(region)
        self._regions.clear()
        for part in (self.scratch, self.domain, self.context):
            _close(part)

    def _place(self) -> tuple[int, str, str]:
        """The index of the address to use, the address, and the fabric it belongs to."""
        gids = SYS_CLASS / self.name / "ports" / str(self.port)
        candidates = []
        for index in range(len(list((gids / "gids").iterdir()))):
            with suppress(OSError):  # an unset entry has no type
                kind = (gids / "gid_attrs" / "types" / str(index)).read_text().strip()
                address = ipaddress.IPv6Address((gids / "gids" / str(index)).read_text().strip())
                netdev = ""
                with suppress(OSError):
                    netdev = (gids / "gid_attrs" / "ndevs" / str(index)).read_text().strip()
                candidates.append((index, kind, address, netdev))
        for index, kind, address, netdev in candidates:
            if kind == "RoCE v2" and address.ipv4_mapped is not None:
                return index, str(address), _subnet(netdev, address.ipv4_mapped)
        for index, kind, address, _ in candidates:
            if kind == "IB/RoCE v1" and self._is_infiniband():
                return index, str(address), f"ib:{int(address) >> 64:016x}"
        raise RdmaError("neither an InfiniBand address nor one of RoCE v2 over IPv4")

    def _is_infiniband(self) -> bool:
        path = SYS_CLASS / self.name / "ports" / str(self.port) / "link_layer"
        return path.read_text().strip() == "InfiniBand"


def _subnet(netdev: str, address: ipaddress.IPv4Address) -> str:
    """Two NICs in one subnet reach each other; whether subnets are routed is not known here."""
    request = struct.pack("16sH14s", netdev.encode()[:15], socket.AF_INET, b"")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        mask = fcntl.ioctl(sock, SIOCGIFNETMASK, request.ljust(40, b"\0"))[20:24]
    return f"roce:{ipaddress.IPv4Interface((int(address), int.from_bytes(mask, 'big').bit_count())).network}"


class VerbsQueuePair:
    """A reliable connection and its completion queue. It closes what is its `own`, the last part first."""

    def __init__(self, device: VerbsDevice, domain: Any, scratch: Any, access: int, *, own: Sequence[Any] = ()) -> None:
        self._device, self._verbs = device, device.verbs
        self._scratch, self._access, self._own = scratch, access, own
        verbs, enums = device.verbs, device.verbs.enums
        self._packet_number = random_packet_number()
        with verbs.errors():
            self._cq = verbs.cq.CQ(device.context, SEND_DEPTH + 2 * RECEIVE_DEPTH)
            try:
                caps = verbs.qp.QPCap(
                    max_send_wr=SEND_DEPTH + 2, max_recv_wr=RECEIVE_DEPTH, max_send_sge=1, max_recv_sge=1
                )
                init = verbs.qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=caps, sq_sig_all=0)
                attributes = verbs.qp.QPAttr(port_num=device.port)
                attributes.qp_access_flags = access
                self._qp: Any = verbs.qp.QP(domain, init, attributes)
            except BaseException:
                self._cq.close()
                raise

    @property
    def end(self) -> QueuePairEnd:
        return QueuePairEnd(
            number=self._qp.qp_num, packet_number=self._packet_number, gid=self._device.gid, mtu=self._device.mtu
        )

    def connect(self, peer: QueuePairEnd) -> None:
        verbs, device = self._verbs, self._device
        mtu = min(peer.mtu, device.mtu)
        with verbs.errors():
            attributes = verbs.qp.QPAttr(port_num=device.port)
            attributes.dest_qp_num = peer.number
            attributes.path_mtu = MTUS.index(mtu) + 1
            attributes.rq_psn, attributes.sq_psn = peer.packet_number, self._packet_number
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
            attributes.min_rnr_timer, attributes.rnr_retry = 12, 6
            attributes.timeout, attributes.retry_cnt = device.options.timeout_exponent, device.options.retries
            attributes.qp_access_flags = self._access
            route = verbs.addr.GlobalRoute(dgid=verbs.addr.GID(_long_form(peer.gid)), sgid_index=device.gid_index)
            attributes.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, port_num=device.port)
            self._qp.to_rts(attributes)

    def write(self, posting: Posting, local_key: int, remote_key: int) -> None:
        enums = self._verbs.enums
        with_number = posting.number is not None
        write = posting.write
        request = self._verbs.wr.SendWR(
            wr_id=posting.wr_id,
            opcode=enums.IBV_WR_RDMA_WRITE_WITH_IMM if with_number else enums.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[self._verbs.wr.SGE(write.source, write.length, local_key)],
            imm_data=posting.number or 0,
            send_flags=enums.IBV_SEND_SIGNALED if posting.signalled else 0,
        )
        request.set_wr_rdma(remote_key, write.target)
        with self._verbs.errors():
            self._qp.post_send(request)

    def prove(self) -> None:
        scratch = self._scratch
        self.write(Posting(PROOF, RailWrite(scratch.buf, 0, 0), True), scratch.lkey, 0)

    def receive(self) -> None:
        scratch = self._scratch  # of our own, or the peer's buffer: nothing is read from it
        entry = self._verbs.wr.SGE(scratch.buf, SCRATCH_BYTES, scratch.lkey)
        with self._verbs.errors():
            self._qp.post_recv(self._verbs.wr.RecvWR(wr_id=0, num_sge=1, sg=[entry]))

    def poll(self) -> list[WorkCompletion]:
        with self._verbs.errors():
            _, found = self._cq.poll(POLL_BATCH)
        return [self._completion(entry) for entry in found]

    def _completion(self, entry: Any) -> WorkCompletion:
        if entry.status:
            return WorkCompletion(
                wr_id=entry.wr_id, error=self._verbs.status_names.get(entry.status, str(entry.status))
            )
        received = entry.opcode == self._verbs.enums.IBV_WC_RECV_RDMA_WITH_IMM
        return WorkCompletion(wr_id=entry.wr_id, number=entry.imm_data if received else None)

    def close(self) -> None:
        for part in (self._qp, *reversed(self._own), self._cq):
            _close(part)


def _long_form(gid: str) -> str:
    """GID() of pyverbs takes eight full groups only."""
    return ipaddress.IPv6Address(gid).exploded


def _close(part: Any) -> None:
    try:
        part.close()
    except Exception as exc:  # the device is gone, or someone still uses it: there is nothing more to do here
        log.warning("closing a %s failed: %s", type(part).__name__, exc)
