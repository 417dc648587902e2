"""A gateway of several processes: the parent serves no requests. It starts workers, restarts what dies, and passes signals on.

    parent ── board, names of sockets in a directory of its own ── worker 0 … N-1, all listening on one port

The kernel deals connections out among those that listen (SO_REUSEPORT). A worker that dies takes its own streams with it and
nothing else: what it had under way is cleared from all that workers share, at once, and what it had counted stays. One that is
stopped or stuck is killed: the kernel deals it connections all the same. Its successor begins with the file as it was at
the start, like the others, whatever it says meanwhile. Should the parent die, workers stop listening and let their streams
end; so a gateway that is started again gets the port. They do the same when another gateway replaces this one.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.gateway import GatewayConfig
from gateway.errors import NotReplaced, WorkersFail
from gateway.workers.generation import Generation, shared_memory
from gateway.workers.process_scope import BOARD, FIRST_CONFIG, ORPHANED, VERDICT, WorkerPlace
from gateway.workers.shared_counters import MOST_NODES, SharedCounters
from node.process.children import Child, kill_group
from node.process.owned_names import OwnedDirectory
from node.process.restarts import Restarts
from prompts.tokens.encoder import EncoderVerdict
from transport.path.tcp import format_address

log = logging.getLogger("prfaas.gateway.workers")

LOOKS: Final = 10  # in the time after which a worker counts as silent
MAX_RESTARTS: Final = 5  # of one worker, within a minute or without having served
LOOK_S: Final = 0.05  # between looks whether a worker that starts is there
SILENCE_S: Final = 30.0  # a worker says four times a second that it is there
START_S: Final = 120.0  # a second or two on an idle machine
BAD_CONFIG: Final = 2
NOT_REPLACED: Final = 4
CANNOT_START: Final = -1
KILLED: Final = (-signal.SIGKILL, -signal.SIGTERM)  # by another process, unless we did it


class Workers:
    """The processes of one gateway. `command` starts a worker, given its seat."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        board: SharedCounters,
        now: Callable[[], float],
        max_restarts: int = MAX_RESTARTS,
        silence_s: float = SILENCE_S,
        start_s: float = START_S,
        on_ended: Callable[[int], None] = lambda number: None,
        descriptors: Callable[[int], Sequence[int]] = lambda number: (),
        gives_way: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_ended` hears of each worker that has ended, before its next one starts. `descriptors` are what a worker is given.

        `gives_way` is asked when they are to end: whether another gateway serves on the ports.
        """
        self._gives_way = gives_way
        self._on_ended = on_ended
        self._descriptors = descriptors
        self._command = command
        self._board = board
        self._now = now
        self._max_restarts = max_restarts
        self._silence_s = silence_s
        self._start_s = start_s
        self._running: dict[int, Child] = {}
        self._has_reloaded = False
        self._ready: set[int] = set()
        self._killed_by_us: set[int] = set()
        self._served: set[int] = set()  # workers that have been ready once
        self._all_ready = asyncio.Event()
        self._stopping = asyncio.Event()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Keeps all workers up until `stop`, and then until all have ended. Raises WorkersFail."""
        try:
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(self._tell(on_ready))
                keeping = [group.create_task(self._keep(number)) for number in range(self._board.workers)]
                await asyncio.wait(keeping, return_when=asyncio.FIRST_EXCEPTION)
                telling.cancel()
        except* WorkersFail as failures:
            self.stop()
            await asyncio.gather(*(self._ended(number, child) for number, child in list(self._running.items())))
            raise failures.exceptions[0] from None

    def stop(self) -> None:
        """Ends all workers in order; called again, at once. If another gateway serves on the ports, they only leave them.

        Then it takes a third call: the second one is their first signal.
        """
        if not self._stopping.is_set() and self._gives_way():
            self.leave()
            return
        self._stopping.set()
        for child in self._running.values():
            child.terminate()

    def leave(self) -> None:
        """Has all workers leave their ports to others, and end when their clients have."""
        self._stopping.set()
        for child in self._running.values():
            child.send(ORPHANED)

    def reload(self) -> None:
        """Has all workers read their configuration again; those that start do when they are there."""
        self._has_reloaded = True
        for number in self._ready & self._running.keys():
            self._running[number].send(signal.SIGHUP)

    async def _tell(self, on_ready: Callable[[], None]) -> None:
        await self._all_ready.wait()
        if not self._stopping.is_set():
            on_ready()

    async def _keep(self, number: int) -> None:
        restarts = Restarts(self._max_restarts)
        while not self._stopping.is_set():
            status = await self._run_once(number, restarts)
            self._board.clear(number)
            self._on_ended(number)
            if self._stopping.is_set():
                return
            pause_s = self._pause_s(number, status, restarts)
            if pause_s is None:
                raise WorkersFail(number, status, max(1, restarts.deaths))
            log.error("worker %d ended with status %d: it restarts in %g s", number, status, pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            self._board.restarted()

    def _pause_s(self, number: int, status: int, restarts: Restarts) -> float | None:
        """Until the next start; None: no start follows."""
        if status in (BAD_CONFIG, NOT_REPLACED) and number not in self._served:
            return None
        if status in KILLED and number not in self._killed_by_us:
            return restarts.on_kill(self._now())
        self._killed_by_us.discard(number)
        return restarts.on_death(self._now())

    def _kill(self, number: int, child: Child) -> None:
        self._killed_by_us.add(number)
        kill_group(child.pid)

    async def _run_once(self, number: int, restarts: Restarts) -> int:
        try:
            child = self._running[number] = self._start(number)
        except OSError as error:  # no memory for a process, say: may pass
            log.error("worker %d cannot be started: %s", number, error)
            return CANNOT_START
        try:
            status = await self._until_ended(number, child, restarts)
        finally:
            # Cancelled, its end is awaited by `run`.
            self._ready.discard(number)
        del self._running[number]
        return status

    def _start(self, number: int) -> Child:
        return Child(
            self._command(number),
            output=sys.stderr,
            environment=os.environ,
            orphaned_by=ORPHANED,
            descriptors=self._descriptors(number),
        )

    async def _until_ended(self, number: int, child: Child, restarts: Restarts) -> int:
        ending = asyncio.create_task(child.wait())
        began = self._now()
        try:
            while not ending.done() and not self._board.state(number) and not self._stopping.is_set():
                await asyncio.wait([ending], timeout=LOOK_S)
                is_late = self._now() - began >= self._start_s
                if is_late and not ending.done() and not self._board.state(number):
                    log.error(
                        "worker %d did not start within %.0f s, pid=%d: killing it", number, self._start_s, child.pid
                    )
                    self._kill(number, child)
                    await ending
            if not ending.done() and self._board.state(number):
                restarts.on_ready()
                self._is_ready(number)
                if self._has_reloaded:
                    child.send(signal.SIGHUP)
            await self._end_if_silent(number, child, ending)
            return await ending
        finally:
            ending.cancel()

    async def _ended(self, number: int, child: Child) -> None:
        ending = asyncio.create_task(child.wait())
        try:
            await self._end_if_silent(number, child, ending)
        finally:
            ending.cancel()

    async def _end_if_silent(self, number: int, child: Child, ending: "asyncio.Task[int]") -> None:
        """Waits until a worker has ended. It kills one that is stopped or stuck: its clients wait in vain."""
        heard, since = self._board.beats(number), self._now()
        while not ending.done():
            looked_at = self._now()
            await asyncio.wait([ending], timeout=self._silence_s / LOOKS)
            beats, now = self._board.beats(number), self._now()
            if beats != heard or now - looked_at >= self._silence_s / 2:  # or it was we who were not there
                heard, since = beats, now
            elif not ending.done() and now - since >= self._silence_s:
                log.error("worker %d was silent for %.0f s, pid=%d: killing it", number, now - since, child.pid)
                self._kill(number, child)
                await ending

    def _is_ready(self, number: int) -> None:
        self._ready.add(number)
        self._served.add(number)
        log.info("worker %d serves, pid=%d", number, self._running[number].pid)
        if len(self._served) == self._board.workers:
            self._all_ready.set()


async def serve_with_workers(
    config: GatewayConfig,
    path: Path,
    command: Callable[[WorkerPlace], Sequence[str]],
    announce: Callable[[str], None],
    generation: Generation,
    verdict: EncoderVerdict | None = None,
) -> int:
    """A gateway of `config.workers` processes until SIGTERM or SIGINT; returns the exit status.

    `path` is the file of the configuration, which workers begin with a copy of; `verdict` is that on the
    tokenizer's fast encoder. `command` makes a worker's out of its place.

    Raises GatewayConfigError, and NotReplaced where this one was to take the place of another gateway.
    """
    loop = asyncio.get_running_loop()
    host, port = generation.ports.address
    with _laid_out(config, path, verdict) as directory:
        board = SharedCounters(directory / BOARD)

        def on_ended(number: int) -> None:
            generation.clear(number)
            generation.renew(number)

        workers = Workers(
            lambda number: command(
                WorkerPlace(directory=str(directory), number=number, place=generation.place(number))
            ),
            board,
            loop.time,
            on_ended=on_ended,
            descriptors=generation.descriptors,
            gives_way=generation.give_way,
        )

        def stop() -> None:
            generation.retire()
            workers.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, workers.reload)

        ready = f"gateway ready url={config.scheme}://{format_address(host, port)}"
        try:
            await workers.run(lambda: generation.take_charge(workers.leave, lambda: announce(ready)))
            if generation.is_replacing:
                raise NotReplaced("the new one was told to end")
        except WorkersFail as error:
            if generation.is_replacing:
                raise NotReplaced(str(error)) from error
            log.error("%s", error)
            return BAD_CONFIG if error.status == BAD_CONFIG else 1
        finally:
            generation.stop()
            board.close()
    return 0


@contextmanager
def _laid_out(config: GatewayConfig, path: Path, verdict: EncoderVerdict | None) -> Iterator[Path]:
    owned = OwnedDirectory(shared_memory())
    try:
        shutil.copyfile(path, owned.path / FIRST_CONFIG)
        (owned.path / VERDICT).write_bytes(msgspec.json.encode(verdict))
        SharedCounters.create(owned.path / BOARD, config.workers, max(MOST_NODES, 2 * len(config.nodes)))
        yield owned.path
    finally:
        owned.close()
