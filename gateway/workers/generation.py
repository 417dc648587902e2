"""One generation of a gateway: what it takes over from the one before, and hands on to the next.

    begun ── sockets, places ──► serving ── take_charge: the one before leaves ──► in charge ── the next one serves ──► leaving

The new one accepts before the old one stops, and from the same queues, so no connection is refused or lost.
"""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from gateway.config.gateway import GatewayConfig
from gateway.errors import NotReplaced
from gateway.ratelimit.limiter import TenantLimiters
from gateway.workers.handover import HandoverDoor, HandoverOffer, Predecessor
from gateway.workers.lineage import ALLOWANCES, FORMAT, Lineage
from gateway.workers.ports import Ports, fitting, passed_by_systemd
from gateway.workers.process_scope import Place
from gateway.workers.service_manager import READY, STOPPING, main_process, notify
from node.process.owned_names import sweep_directories

log = logging.getLogger("prfaas.gateway.generation")

SHARED_MEMORY: Final = Path("/dev/shm")
LOOK_S: Final = 1.0  # between two looks whether a generation before has ended
OWN_VARIABLES: Final = ("PROMETHEUS_MULTIPROC_DIR", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
REPLACE: Final = signal.SIGUSR2  # has a gateway start its successor


def shared_memory() -> Path:
    """Where processes of a gateway lay out what they share."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


class Generation:
    """One running generation. All but `begun` runs on its event loop."""

    def __init__(
        self,
        name: str,
        ports: Ports,
        lineage: Lineage,
        first_place: int,
        predecessor: Predecessor | None,
        ready_s: float,
        successor: Callable[[], list[str]],
    ) -> None:
        """`successor` is the command that starts one."""
        self.ports = ports
        self.failure = ""  # why the one before could not be replaced, though this one serves
        self.is_left = False  # another generation is in charge
        self.is_replacing = predecessor is not None  # until it is in charge
        self._name = name
        self._lineage = lineage
        self._first_place = first_place
        self._predecessor = predecessor
        self._ready_s = ready_s
        self._successor = successor
        self._allowances: TenantLimiters | None = None
        self._door: HandoverDoor | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._is_ending = False
        self._taking_charge: asyncio.Task[None] | None = None
        self._leave: Callable[[], None] = lambda: None

    def place(self, worker: int) -> Place:
        """The place of one of its workers."""
        return Place(
            lineage=str(self._lineage.path),
            number=self._first_place + worker,
            sockets={name: [each.fileno() for each in some] for name, some in self.ports.of(worker).items()},
            ready_s=self._ready_s if self.is_replacing else None,
        )

    def descriptors(self, worker: int) -> list[int]:
        """The descriptors that a worker must be given."""
        return [*self._lineage.locks, *(each.fileno() for some in self.ports.of(worker).values() for each in some)]

    def own_place(self) -> Place:
        """The place of this process, where it is the only one. Its descriptors are copies."""
        place = self.place(0)
        return Place(
            lineage=place.lineage,
            number=place.number,
            sockets={name: [os.dup(fd) for fd in fds] for name, fds in place.sockets.items()},
            ready_s=place.ready_s,
        )

    def take_charge(self, leave: Callable[[], None], announce: Callable[[], None]) -> None:
        """It serves: the one before leaves, and then it is announced. `leave` is called when the next one serves."""
        self._leave = leave
        self.is_replacing = False
        self._lineage.take_over()
        self._taking_charge = asyncio.create_task(self._take_charge(announce), name="take charge")
        self._taking_charge.add_done_callback(self._charge_taken)

    async def _take_charge(self, announce: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if self._predecessor is not None:
            try:
                await asyncio.to_thread(self._predecessor.leave)
            except NotReplaced as error:
                self.failure = str(error)
                self._leave_ports()
                return
            with suppress(OSError):
                await asyncio.to_thread(sweep_directories, shared_memory())
        if self._is_ending:
            return
        self._door = HandoverDoor(self._name, self._offer, self._left)
        loop.add_signal_handler(REPLACE, self._start_successor)
        self._look()
        notify(os.environ, READY)
        announce()

    def _charge_taken(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("this gateway serves, and cannot be replaced by another one", exc_info=error)

    def clear(self, worker: int) -> None:
        """A worker has ended: what it had under way counts no more."""
        self._lineage.clear(self._limiters(), self._first_place + worker)

    def renew(self, worker: int) -> None:
        """A worker has ended: its next one gets other sockets. While another generation has the same ones, they stay.

        The kernel would still deal connections to them.
        """
        before_serves = self._predecessor is not None and self._door is None
        next_is_coming = self._door is not None and self._door.has_offered
        if not (before_serves or next_is_coming):
            self.ports.renew(worker)

    def give_way(self) -> bool:
        """It will not serve: it closes its ports if another gateway serves there. Returns whether one does."""
        if self.is_replacing:
            self.ports.close()
        return self.is_replacing

    def retire(self) -> None:
        """It is about to end, and offers nothing any more. A successor that has an offer may still take over."""
        self._is_ending = True
        if self._door is not None:
            self._door.close_name()
        if self._looking is not None:
            self._looking.cancel()

    def stop(self) -> None:
        """It ends: no other generation takes it over from now on."""
        self.retire()
        if self._door is not None:
            if self._door.has_offered:
                self._lineage.hand_on()  # the other one may just be about to join
            self._door.close()
        if self._taking_charge is not None:
            self._taking_charge.cancel()
        if self._allowances is not None:
            self._allowances.close()
            self._allowances = None
        if self._door is not None and not self.is_left:
            notify(os.environ, STOPPING)

    def _offer(self) -> tuple[HandoverOffer, list[int]]:
        sockets = self.ports.all()
        offer = HandoverOffer(
            pid=os.getpid(),
            lineage=str(self._lineage.path),
            format=FORMAT,
            sockets={name: len(some) for name, some in sockets.items()},
            host=self.ports.host,
        )
        return offer, [self._lineage.lock, *(each.fileno() for some in sockets.values() for each in some)]

    def _left(self, pid: int) -> None:
        log.info("process %d serves instead: leaving", pid)
        if self._looking is not None:
            self._looking.cancel()
        notify(os.environ, main_process(pid))
        self._leave_ports()

    def _leave_ports(self) -> None:
        self.is_left = True
        self._leave()
        self.ports.close()

    def _look(self) -> None:
        """Clears the places of generations that have ended, and takes the name when it is free. Runs every second."""
        with suppress(OSError):
            self._lineage.sweep(self._limiters())
        assert self._door is not None
        self._door.open()
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _limiters(self) -> TenantLimiters:
        if self._allowances is None:
            # It has no place of its own, and clears those of processes that have ended.
            now = asyncio.get_running_loop().time
            self._allowances = TenantLimiters(now, self._lineage.path / ALLOWANCES, own=None)
        return self._allowances

    def _start_successor(self) -> None:
        if self.is_left or self._is_ending:
            return
        environment = {key: value for key, value in os.environ.items() if key not in OWN_VARIABLES}
        try:
            command = self._successor()
            # Our standard output may be a pipe, whose reader waits until all that have it are gone.
            pid = os.posix_spawn(command[0], command, environment, file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)])
            watched = os.pidfd_open(pid)
        except OSError as error:
            log.error("no successor can be started: %s", error)
            return
        log.info("started process %d to replace this gateway", pid)
        asyncio.get_running_loop().add_reader(watched, self._successor_ended, pid, watched)

    def _successor_ended(self, pid: int, watched: int) -> None:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
        _, status = os.waitpid(pid, 0)
        if not self.is_left:
            log.error("process %d was to replace this gateway, and ended with status %d: this one goes on",
                      pid, os.waitstatus_to_exitcode(status))  # fmt: skip


@contextmanager
def begun(
    config: GatewayConfig, name: str, *, replaces: bool, ready_s: float, successor: Callable[[], list[str]]
) -> Iterator[Generation]:
    """A generation of the gateway with this name. If it `replaces` one that runs, it takes over what that one has.

    Raises CannotListen, NotReplaced, OSError.
    """
    with ExitStack() as held:
        predecessor = Predecessor.of(name) if replaces else None
        if predecessor is not None:
            held.callback(predecessor.close)
        try:
            ports = _ports(config, predecessor)
        except BaseException:
            if predecessor is not None:
                os.close(predecessor.lock)
            raise
        held.callback(ports.close)
        lineage, first_place = _lineage(config, predecessor)
        held.callback(lineage.close)
        generation = Generation(name, ports, lineage, first_place, predecessor, ready_s, successor)
        try:
            yield generation
        except NotReplaced as error:
            if predecessor is not None and predecessor.has_ended():
                raise NotReplaced(str(error), goes_on=False) from error
            raise
        if generation.failure:
            raise NotReplaced(generation.failure)


def _ports(config: GatewayConfig, predecessor: Predecessor | None) -> Ports:
    """Ports on the sockets that we were given. It closes those without use: clients would wait there in vain."""
    given = predecessor.sockets if predecessor is not None else passed_by_systemd(os.environ, config)
    used = set[int]()
    try:
        fit = fitting(given, config) if predecessor is not None else given
        if predecessor is not None and any(fit.values()) and predecessor.host not in ("", config.host):
            raise NotReplaced(
                f"host differs: it is {predecessor.host!r} there; restart the gateway, or change its port, too"
            )
        ports = Ports(config, fit)
        used = {id(each) for some in ports.all().values() for each in some}
        return ports
    finally:
        for each in (each for some in given.values() for each in some if id(each) not in used):
            each.close()


def _lineage(config: GatewayConfig, predecessor: Predecessor | None) -> tuple[Lineage, int]:
    """The predecessor's lineage if its format is ours, else a new one; and our first place in it."""
    if predecessor is not None and predecessor.format == FORMAT:
        try:
            lineage = Lineage.joined(predecessor.lineage, predecessor.lock)
            first = lineage.take(config.workers)
        except OSError as error:
            raise NotReplaced(f"what the gateway that runs keeps cannot be read: {error}") from error
        if first is None:
            raise NotReplaced("gateways that were replaced before have not ended yet: try again later, or restart")
        return lineage, first
    if predecessor is not None:
        log.warning("the gateway that runs keeps its counts in another way: limits and usage begin anew")
        os.close(predecessor.lock)
    parent = shared_memory()
    sweep_directories(parent)
    lineage = Lineage.begun(parent, config.workers)
    first = lineage.take(config.workers)
    assert first is not None
    return lineage, first
