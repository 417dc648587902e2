"""Whether a running engine answers: one that is stopped, or whose server is stuck, breaks no connection to say so.

Two signs, both of the process and none of the model. `stopped`: a process of the engine's is one that the kernel does not run
(SIGSTOP), in two looks one after the other: a debugger's glance is no sign. `unanswered`: its server has not answered
`GET /health` for `SILENCE_S`; any answer is one, a refused connection, too, because every caller sees it at once.

Not seen: a server that answers while a GPU of its hangs. The gateway's `stream_idle_s` bounds that.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import aiohttp

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
ASK_S: Final = 5.0  # a line in the log of a vLLM server each time
SILENCE_S: Final = 10.0  # a server's loop may be busy with a long prompt for seconds
KILL_S: Final = 120.0  # of one that is stopped or stuck, and may come back: its gateways go elsewhere meanwhile
LOOKS: Final = 2  # that a process must be stopped in
PROC: Final = Path("/proc")


class Silence(StrEnum):
    """How an engine's process is not there."""

    STOPPED = "stopped"
    UNANSWERED = "unanswered"


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessTimes:
    """How often an engine is looked at and asked, from when on it is silent, and for how long it may be."""

    look_s: float = LOOK_S
    ask_s: float = ASK_S
    silence_s: float = SILENCE_S
    kill_s: float = KILL_S


TIMES: Final = LivenessTimes()


class Pulse:
    """What two signs say of one engine."""

    def __init__(self, now: Callable[[], float], times: LivenessTimes = TIMES) -> None:
        self._now = now
        self._times = times
        self._looked_at = now()
        self._looks_stopped = 0
        self._asked_at: float | None = None  # the first question that has no answer yet
        self.silent_s = 0.0

    def looked(self, *, is_stopped: bool) -> None:
        now, before = self._now(), self._looked_at
        self._looked_at = now
        self._looks_stopped = self._looks_stopped + 1 if is_stopped else 0
        if self._asked_at is not None and now - before >= self._times.silence_s / 2:
            self._asked_at = now  # it was we who were not there
        self.silent_s = 0.0 if self.silence() is None else self.silent_s + min(now - before, 2 * self._times.look_s)

    def asked(self) -> None:
        if self._asked_at is None:
            self._asked_at = self._now()

    def answered(self) -> None:
        self._asked_at = None

    def silence(self) -> Silence | None:
        """How it is silent now, if it is."""
        if self._looks_stopped >= LOOKS:
            return Silence.STOPPED
        if self._asked_at is not None and self._now() - self._asked_at >= self._times.silence_s:
            return Silence.UNANSWERED
        return None


def is_stopped(leader: int) -> bool:
    """Whether a process, or one that it has started, is stopped."""
    waiting = [leader]
    while waiting:
        process = PROC / str(waiting.pop())
        with suppress(OSError):  # it has ended, or will be found by its next state
            if _state_of(process) == "T":
                return True
            for task in (process / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return False


class Vigil:
    """Who watches the engine of one node: `silence` is how it is silent now, `counts` how often it has been."""

    def __init__(
        self,
        now: Callable[[], float],
        on_change: Callable[[], None],
        *,
        times: LivenessTimes = TIMES,
        is_stopped: Callable[[int], bool] = is_stopped,
    ) -> None:
        self._now = now
        self._on_change = on_change
        self._times = times
        self._is_stopped = is_stopped
        self.silence: Silence | None = None
        self.counts: Counter[str] = Counter(dict.fromkeys(Silence, 0))
        self._pulse: Pulse | None = None  # of the engine that there is

    async def watch(self, url: str, leader: Callable[[], int | None]) -> None:
        """Watches, for ever, an engine that serves at `url` as process `leader`."""
        pulse = self._pulse = Pulse(self._now, self._times)
        async with asyncio.TaskGroup() as both:
            both.create_task(ask(url, pulse, self._times))
            both.create_task(self._look(leader, pulse))

    def end(self) -> None:
        """There is no engine any more. Who still watches is cancelled, but may look once more before that."""
        self.silence = self._pulse = None

    @property
    def silent_s(self) -> float:
        """For how long it has been silent by now, as far as it was looked at."""
        return self._pulse.silent_s if self._pulse is not None else 0.0

    @property
    def is_lost(self) -> bool:
        """Whether it has been silent for longer than an engine may be."""
        return self.silent_s > self._times.kill_s

    async def _look(self, leader: Callable[[], int | None], pulse: Pulse) -> None:
        while True:
            await asyncio.sleep(self._times.look_s)
            pid = leader()
            # Beside the event loop: of ten processes with 300 threads each it takes 100 ms.
            pulse.looked(is_stopped=pid is not None and await asyncio.to_thread(self._is_stopped, pid))
            self._tell(pulse, pulse.silence())

    def _tell(self, pulse: Pulse, silence: Silence | None) -> None:
        if pulse is not self._pulse or silence == self.silence:
            return
        self.silence = silence
        if silence is None:
            log.warning("the engine answers again")
        else:
            self.counts[silence] += 1
            log.error("the engine runs without answering: %s", silence)
        self._on_change()


async def ask(url: str, pulse: Pulse, times: LivenessTimes = TIMES) -> None:
    """Asks a server at `url` for its health for ever, and says so to `pulse`."""
    timeout = aiohttp.ClientTimeout(total=times.silence_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            pulse.asked()
            try:
                async with session.get(f"{url}/health"):
                    pass
            except TimeoutError:
                continue  # it is still asked
            except (aiohttp.ClientError, OSError):
                pass  # there is no server that could be silent: legs to it hear the same
            pulse.answered()
            await asyncio.sleep(times.ask_s)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, even if its status was not asked for yet."""
    try:
        return _state_of(PROC / str(pid)) in ("Z", "X")
    except OSError:
        return True


def _state_of(process: Path) -> str:
    """One letter (proc(5)); the name of a program before it may have brackets of its own. Raises OSError."""
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
