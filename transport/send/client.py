"""The sending end: lanes to every peer, shared by all transfers to it.

A peer has up to N lanes. Each is a thread with one connection: it asks the scheduler for work, sends it, and reads the
receiver's replies in between. Lanes connect when there is work for them, stay connected (pinging) afterwards, and come
back with backoff when they break; what they had on their way is sent again by the others.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from transport.coding.budget import CodingBudget
from transport.coding.choice import CodecAccounts, CpuMeter
from transport.errors import Closed, LocalProtocolError
from transport.path.link import LinkState
from transport.path.pacing import Budget, BudgetShare, EgressBudget, rate_now
from transport.path.shm import ArenaSource
from transport.rdma.rails import RailReport
from transport.send.options import ClientOptions
from transport.send.peer import Peer
from transport.send.schedule.push import OnPushed, Push, PushResult
from transport.send.sieve import Sieve
from transport.send.spec import TransferSpec, Via
from transport.wire.encoding import check_opening
from transport.wire.manifest import Manifest, RangeViews

__all__ = ["ClientOptions", "OnPushed", "Push", "PushResult", "TransferClient", "TransferSpec", "Via"]

log = logging.getLogger(__name__)

HOUSEKEEPING_SHARE: Final = 0.05  # of a core, at most
IDLE_HOUSEKEEPING_S: Final = 1.0
PeerKey: TypeAlias = tuple[str, Via, str, str]
"""Address, path, over TCP the link, and the node that must answer: an address behind two links is two peers, each with the budget
of its link."""


class TransferClient:
    """Sends transfers to any number of peers. Callbacks come from transport threads and must not block."""

    def __init__(self, *, options: ClientOptions | None = None, cpu_meter: Callable[[], CpuMeter] = CpuMeter) -> None:
        self.options = options or ClientOptions()
        self._cpu_meter = cpu_meter
        self._coding_budget = CodingBudget(self.options.coding_cores)
        self._lock = threading.Condition()
        self._peers: dict[PeerKey, Peer] = {}
        self._default_budget = self.options.egress_bytes_per_s
        self._budgets: dict[str, Budget] = {}  # of links that have one of their own
        self._shares: dict[str, BudgetShare] = {}  # of links whose budget several senders share, until they end
        self._egress: WeakValueDictionary[str, EgressBudget] = WeakValueDictionary()  # by link, as long as it has peers
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._internal_errors: Counter[str] = Counter()
        self._errors_lock = threading.Lock()  # taken last of all
        self._past_codecs: dict[str, CodecAccounts] = {}  # of peers that are gone, by link
        self._gone_fallback_bytes: Counter[str] = Counter()  # of peers that were closed
        self._gone_bytes: dict[str, tuple[int, int]] = {}  # delivered to them and retransmitted, by link
        self._sieve: Sieve[PeerKey] = Sieve()
        self._leaving: list[Peer] = []  # evicted, their threads not joined yet
        self._closing = False
        self._keeper = threading.Thread(target=self._keep_time, name="kv-client", daemon=True)
        self._keeper.start()

    def open(self, spec: TransferSpec, source: RangeViews, *, on_done: OnPushed | None = None) -> Push:
        """Begins a transfer whose range i lies in `source(i)` once `push.ready(i)` says so.

        The memory must stay as it is until `on_done(PushResult)`. Within a host and over RDMA the source must be an
        ArenaSource. Raises LocalProtocolError for a source or a path that this client does not have. Raises ValueError
        for an id or a placement that no frame can carry.
        """
        if spec.via is not Via.TCP and not isinstance(source, ArenaSource):
            raise LocalProtocolError("a transfer on the same host, or over RDMA, needs an ArenaSource")
        if spec.via is Via.RDMA and self.options.rdma is None:
            raise LocalProtocolError("a transfer over RDMA needs NICs (ClientOptions.rdma)")
        check_opening(spec.transfer_id, source.path if isinstance(source, ArenaSource) else "", spec.placement)
        manifest = Manifest(spec.sizes)
        with self._lock:  # a peer cannot be evicted between being found and being given work
            push = self._peer(spec).open(spec, manifest, source, on_done, time.monotonic())
            evicted = self._evict()
        for peer in evicted:
            peer.stop()
        return push

    def link(self, address: str) -> LinkState:
        """The TCP link to a peer as last sampled (every 10 to 30 ms while something is under way)."""
        found = (peer.link for key, peer in list(self._peers.items()) if key[:2] == (address, Via.TCP))
        return next(found, LinkState(peer=address, at=time.monotonic()))

    def links(self) -> list[LinkState]:
        """Every TCP link there is."""
        return [peer.link for (_, via, *_), peer in list(self._peers.items()) if via is Via.TCP]

    def gone(self) -> dict[str, tuple[int, int]]:
        """Bytes that peers which were closed since had taken over TCP, and bytes retransmitted to them, by link."""
        with self._lock:
            return dict(self._gone_bytes)

    def delivered(self) -> dict[str, tuple[int, int]]:
        """The same of all peers there are and were: never falls."""
        with self._lock:
            total = dict(self._gone_bytes)
            for peer in (*self._peers.values(), *self._leaving):
                _add_delivered(total, peer)
        return total

    def rails(self) -> list[RailReport]:
        """Pairs of NICs that carry, or should carry, transfers over RDMA."""
        return [rail for peer in list(self._peers.values()) for rail in peer.rails]

    def fallback_bytes(self) -> Counter[str]:
        """Bytes that should have gone over RDMA and went over TCP, by reason."""
        with self._lock:
            peers, total = [*self._peers.values(), *self._leaving], Counter(self._gone_fallback_bytes)
        return sum((peer.fallback_bytes for peer in peers), total)

    def codecs(self) -> dict[str, CodecAccounts]:
        """Coded bytes, by link."""
        accounts: dict[str, CodecAccounts] = {}
        with self._lock:
            peers = [*self._peers.values(), *self._leaving]
            for link, past in self._past_codecs.items():
                accounts.setdefault(link, CodecAccounts()).merge(past)
        for peer in peers:
            if peer.coding.active:
                accounts.setdefault(peer.link_keeper.name, CodecAccounts()).merge(peer.codecs)
        return accounts

    @property
    def refusals(self) -> Counter[tuple[str, str]]:
        """How often peers turned our connections away, by link and frames.Code."""
        with self._lock:
            return Counter(self._refusals)

    @property
    def internal_errors(self) -> Counter[str]:
        """Unforeseen errors, survived and logged, by the thread in which they came up: "lane", "keeper"."""
        with self._errors_lock:
            return Counter(self._internal_errors)

    def set_egress_budget(self, budget: Budget, link: str | None = None) -> None:
        """Changes the budget of one link, used already or not; or of all there are and will be."""
        with self._lock:
            if link is None:
                self._default_budget = budget
                self._budgets.clear()
            else:
                self._budgets[link] = budget
            for name, egress in list(self._egress.items()):
                if link in (None, name):
                    egress.set(budget, time.monotonic())
            peers = list(self._peers.values())
        for peer in peers:
            peer.follow_budget()

    def egress_budget(self, link: str) -> float | None:
        """The rate that a link's budget, its own or the common one, allows at this time of the day, without any
        share."""
        with self._lock:
            return rate_now(self._budgets.get(link, self._default_budget))

    def set_egress_share(self, share: BudgetShare, link: str, now: float) -> None:
        """Keeps to a share of a link's budget, used already or not, until it ends."""
        with self._lock:
            self._shares = {name: each for name, each in self._shares.items() if now < each.until}
            self._shares[link] = share
            if (egress := self._egress.get(link)) is not None:
                egress.take_share(share, now)
            peers = list(self._peers.values())
        for peer in peers:
            peer.follow_budget()

    def close(self) -> None:
        """Fails what is under way, ends all connections, joins every thread. Idempotent."""
        with self._lock:
            self._closing = True
            peers = [*self._peers.values(), *self._leaving]
            self._lock.notify_all()
        for peer in peers:
            peer.stop()
        for peer in peers:
            peer.join()
        if self._keeper is not threading.current_thread():
            self._keeper.join()

    def __enter__(self) -> "TransferClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refused(self, link: str, code: str) -> None:
        with self._lock:
            self._refusals[link, code] += 1

    def _failed(self, thread: str) -> None:
        """An unforeseen error, in an except clause: the thread goes on."""
        log.exception("an error in a %s", thread)
        with self._errors_lock:
            self._internal_errors[thread] += 1

    def _egress_of(self, link: str) -> EgressBudget:
        egress = self._egress.get(link)
        if egress is None:
            egress = self._egress[link] = EgressBudget(self._budgets.get(link, self._default_budget))
            if (share := self._shares.get(link)) is not None:
                egress.take_share(share, time.monotonic())
        return egress

    def _peer(self, spec: TransferSpec) -> Peer:
        """With the lock held."""
        if self._closing:
            raise Closed("the client is closed")
        link = spec.link or spec.address
        key = (spec.address, spec.via, link if spec.via is Via.TCP else "", spec.receiver)
        if key not in self._peers:
            self._peers[key] = Peer(
                spec.address,
                spec.via,
                self.options.on(link),
                link=link,
                receiver=spec.receiver,
                egress=self._egress_of(link) if spec.via is Via.TCP else EgressBudget(),
                coding_budget=self._coding_budget,
                on_refused=self._refused,
                on_failed=self._failed,
            )
        self._sieve.touch(key)
        self._lock.notify_all()
        return self._peers[key]

    def _evict(self) -> list[Peer]:
        """Peers to close, since there are too many; with the lock held."""
        evicted = []
        while len(self._peers) > self.options.max_peers:
            key = self._sieve.evict(lambda key: not self._peers[key].busy)
            if key is None:
                break
            evicted.append(self._peers.pop(key))
        self._leaving += evicted
        return evicted

    def _retire_idle(self, now: float) -> list[Peer]:
        """Peers to close, since nothing goes to them; with the lock held."""
        # Work that came a moment ago is not in `busy_at` yet.
        since = now - self.options.idle_timeout_s
        idle = [key for key, peer in self._peers.items() if not peer.busy and peer.busy_at < since]
        for key in idle:
            self._sieve.remove(key)
        retired = [self._peers.pop(key) for key in idle]
        self._leaving += retired
        return retired

    def _keep_time(self) -> None:
        cpu = self._cpu_meter()
        spent_s = 0.0
        while True:
            with self._lock:
                if self._closing:
                    return
                pauses_s = [peer.sampling_s for peer in self._peers.values() if peer.busy]
                pauses_s += [peer.sampling_s for peer in self._leaving]
                shortest_s = min(pauses_s, default=IDLE_HOUSEKEEPING_S)
                self._lock.wait(max(shortest_s, spent_s / HOUSEKEEPING_SHARE) if pauses_s else shortest_s)
            began = time.thread_time()
            try:
                self._keep_house(cpu)
            except Exception:
                self._failed("keeper")
                with self._lock:
                    self._lock.wait_for(lambda: self._closing, IDLE_HOUSEKEEPING_S)
            spent_s = time.thread_time() - began

    def _keep_house(self, cpu: CpuMeter) -> None:
        with self._lock:
            retired = self._retire_idle(time.monotonic())
            leaving, peers = list(self._leaving), list(self._peers.values())
        for peer in retired:
            peer.stop()
        for peer in leaving:
            if peer.stopped:  # a lane that is dialling takes its time, which the others' deadlines have not
                self._bury(peer)
        # A client that codes nothing need not know how busy the machine is.
        coding_s = [peer.coding.cpu_s for peer in peers if peer.coding.active]
        now = time.monotonic()
        idle_cores = self._coding_budget.follow(cpu.idle_cores(now, sum(coding_s)), now) if coding_s else 0.0
        for peer in peers:
            try:
                peer.keep(time.monotonic(), idle_cores)
            except Exception:  # out of descriptors, for instance: the deadlines of others must hold all the same
                self._failed("keeper")

    def _bury(self, peer: Peer) -> None:
        """The peer is gone; its counts stay."""
        peer.join()
        with self._lock:
            self._past_codecs.setdefault(peer.link_keeper.name, CodecAccounts()).merge(peer.codecs)
            self._gone_fallback_bytes += peer.fallback_bytes
            _add_delivered(self._gone_bytes, peer)
            self._leaving.remove(peer)


def _add_delivered(total: dict[str, tuple[int, int]], peer: Peer) -> None:
    if peer.via is Via.TCP:
        state = peer.link
        delivered, resent = total.get(peer.link_keeper.name, (0, 0))
        total[peer.link_keeper.name] = delivered + state.bytes_total, resent + state.retransmitted_bytes_total
