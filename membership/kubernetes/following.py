"""Follows collections of one API server, in a thread with an event loop of its own.

All together is as good as the worst of them: what is known counts only while each one can be followed.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from membership.errors import KubernetesFailed
from membership.kubernetes.client import ApiClient
from membership.kubernetes.objects import shown
from membership.kubernetes.reflector import Collection, Reflector, ReflectorTimes
from membership.kubernetes.settings import NAME, ApiServerConfig

T = TypeVar("T")

log = logging.getLogger(__name__)

AGAIN_S: Final = 5.0  # before all is begun anew, after an error of ours
END_S: Final = 1.0  # that `close` waits for the thread
NAMESPACE_FILE: Final = "namespace"  # beside the token


class CollectionFollower:
    """Its thread begins with the first look at what is known."""

    def __init__(
        self,
        config: ApiServerConfig,
        begin: Callable[[], Sequence[Collection[Any]]],
        clock: Callable[[], float],
        rng: np.random.Generator,
        begin_s: float,
        times: ReflectorTimes,
        what: str,
    ) -> None:
        """`begin` forgets what was known, and says what is followed; so it does again after an error of ours.

        A look waits up to `begin_s` until `what` was listed.
        """
        self._config = config
        self._collections = begin
        self._clock = clock
        self._rng = rng
        self._begin_s = begin_s
        self._times = times
        self._what = what
        self._changed = threading.Condition()  # of what follows
        self._states: dict[str, KubernetesFailed | None] = {}  # of each collection that has been tried, by path
        self._followed = 0  # how many there are; 0: not known yet
        self._is_closed = False
        self._reflecting: asyncio.Task[object] | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def known(self) -> Iterator[None]:
        """Inside, all is known, and stays as it is. Raises KubernetesFailed."""
        with self._changed:
            self._begin()
            self._changed.wait_for(lambda: self._is_closed or self._failure() or self._is_synced, self._begin_s)
            if self._is_closed:
                raise KubernetesFailed("unreachable", f"{self._config.base}: no longer asked")
            if (failure := self._failure()) is not None:
                raise failure.with_traceback(None)  # which grows with each look
            if not self._is_synced:
                text = f"{self._config.base}: not all {self._what} were listed in {self._begin_s:g} s"
                raise KubernetesFailed("late", text)
            yield

    def told(self, tell: Callable[[T], None]) -> Callable[[T], None]:
        """Tells what is found, while no look reads it."""

        def told(found: T) -> None:
            with self._changed:
                tell(found)

        return told

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            reflecting, thread = self._reflecting, self._thread
        if reflecting is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                # Only this task: it ends those that it has begun, and aiohttp those of a connection on its way.
                reflecting.get_loop().call_soon_threadsafe(reflecting.cancel)
        if thread is not None:
            thread.join(END_S)

    def _begin(self) -> None:
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._follow, name="kubernetes", daemon=True)
            self._thread.start()

    @property
    def _is_synced(self) -> bool:
        return 0 < self._followed == len(self._states)

    def _failure(self) -> KubernetesFailed | None:
        return next((state for state in self._states.values() if state is not None), None)

    def _follow(self) -> None:
        """What the thread does, until it is closed."""
        while not self._is_closed:
            try:
                asyncio.run(self._reflect())
            except asyncio.CancelledError:
                return
            except KubernetesFailed as failure:
                self._state("", failure)
            except Exception:
                log.exception("kubernetes: following the API server has failed, and is begun anew")
                self._state("", KubernetesFailed("broken", "following the API server has failed: the log says why"))
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, AGAIN_S)

    async def _reflect(self) -> None:
        with self._changed:
            self._reflecting = asyncio.current_task()
            if self._is_closed:
                return
            self._states, self._followed = {}, 0
            collections = self._collections()
            self._followed = len(collections)
        client = ApiClient(self._config, self._times.call_s)
        try:
            async with asyncio.TaskGroup() as group:
                for each in collections:
                    told = partial(self._state, each.path)
                    reflector = Reflector(client, each, told, self._clock, self._rng, self._times)
                    group.create_task(reflector.run(), name=each.path)
        finally:
            await client.close()
            with self._changed:
                self._reflecting = None

    def _state(self, path: str, state: KubernetesFailed | None) -> None:
        with self._changed:
            self._states[path] = state
            self._changed.notify_all()


def own_namespace(config: ApiServerConfig) -> str:
    """The namespace of the Pod that we run in. Raises KubernetesFailed."""
    path = config.token_file.with_name(NAMESPACE_FILE)
    try:
        name = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KubernetesFailed("unreadable", f"namespaces are not named, and {path}: {error}") from error
    if not NAME.fullmatch(name):
        raise KubernetesFailed("unreadable", f"namespaces are not named, and {path} names none: {shown(name)!r}")
    return name
