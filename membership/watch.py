"""Asks registries again and again, each in a thread of its own: a file server that hangs holds up nothing else."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from membership.errors import SourceFailed
from membership.sources import Source
from membership.view import RegistryReading, View
from transport.threads import in_daemon_thread

POLL_S: Final = 0.25  # a look costs a stat, or one for each node of a folder
LATE_S: Final = 5.0  # a registry that has not answered by then counts as lost until it does

Answer = RegistryReading | SourceFailed | None


class MembershipWatch:
    """Tells `on_view` whenever the view of a registry has changed, and `on_failure` the first label of each failure."""

    def __init__(
        self,
        sources: Sequence[Source],
        clock: Callable[[], float],
        on_view: Callable[[str, View], None],
        on_failure: Callable[[str, str], None] = lambda source, reason: None,
        poll_s: float = POLL_S,
        late_s: float = LATE_S,
    ) -> None:
        self._sources = sources
        self._clock = clock
        self._on_view = on_view
        self._on_failure = on_failure
        self._poll_s = poll_s
        self._late_s = late_s
        self._views = {source.name: View() for source in sources}
        self._read: dict[str, RegistryReading] = {}  # the latest that each registry has said

    async def run(self) -> None:
        """Until it is cancelled, which closes the registries for good. After an error it may be begun again."""
        try:
            async with asyncio.TaskGroup() as group:
                for source in self._sources:
                    group.create_task(self._follow(source))
        except asyncio.CancelledError:
            for source in self._sources:
                source.close()
            raise

    async def _follow(self, source: Source) -> None:
        while True:
            answer = _asked(source)
            done, _ = await asyncio.wait([answer], timeout=self._late_s)
            if not done:
                self._failed(source.name, "late", f"no answer for {self._late_s:g} s")
            self._heard(source.name, await answer)
            await asyncio.sleep(self._poll_s)

    def _heard(self, name: str, answer: Answer) -> None:
        view = self._views[name]
        if isinstance(answer, SourceFailed):
            self._failed(name, answer.reason, str(answer))
            return
        if answer is not None:
            self._read[name] = answer
        elif view.frozen_since is None:
            return
        # What is as it was before counts again, if the registry has been lost meanwhile.
        if (said := self._read.get(name)) is not None:
            self._now(name, view.read(said, self._clock()))

    def _failed(self, name: str, reason: str, text: str) -> None:
        view = self._views[name].failed(text, self._clock())
        if view != self._views[name]:
            self._on_failure(name, reason)
        self._now(name, view)

    def _now(self, name: str, view: View) -> None:
        if view != self._views[name]:
            self._views[name] = view
            self._on_view(name, view)


def _asked(source: Source) -> "asyncio.Future[Answer]":
    """What the registry says, or why it cannot be asked."""

    def look() -> Answer:
        try:
            return source.look()
        except SourceFailed as failure:
            return failure

    return in_daemon_thread(f"membership-{source.name}", look)
