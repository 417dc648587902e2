"""A registry in Kubernetes, as gateways read it. One thread follows the API server in an event loop of its own.

It is as good as its worst collection: where one namespace cannot be read, the view is frozen as a whole.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from membership.errors import KubernetesFailed
from membership.kubernetes.client import ApiClient
from membership.kubernetes.listing import KubernetesListing
from membership.kubernetes.objects import EndpointSlice, Pod, shown
from membership.kubernetes.reflector import REFLECTOR_TIMES, Collection, Reflector, ReflectorTimes
from membership.kubernetes.settings import KUBERNETES, NAME, KubernetesConfig
from membership.view import RegistryReading

T = TypeVar("T")

log = logging.getLogger(__name__)

BEGIN_S: Final = 4.5  # that a look waits for all lists; a registry counts as lost after LATE_S of MembershipWatch
AGAIN_S: Final = 5.0  # before all is begun anew, after an error of ours
END_S: Final = 1.0  # that `close` waits for the thread
NAMESPACE_FILE: Final = "namespace"  # beside the token
SERVICE_LABEL: Final = "kubernetes.io/service-name"


class KubernetesSource:
    """See `membership.sources.Source`. With a `server_port`, Pods are model servers that answer there."""

    name = KUBERNETES

    def __init__(
        self,
        config: KubernetesConfig,
        clock: Callable[[], float] = time.monotonic,
        rng: np.random.Generator | None = None,
        begin_s: float = BEGIN_S,
        times: ReflectorTimes = REFLECTOR_TIMES,
        server_port: int = 0,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng or np.random.default_rng()
        self._begin_s = begin_s
        self._times = times
        self._server_port = server_port
        self._changed = threading.Condition()  # of what follows
        self._listing = self._new_listing()
        self._states: dict[str, KubernetesFailed | None] = {}  # of each collection that has been tried, by path
        self._followed = 0  # how many there are; 0: not known yet
        self._is_closed = False
        self._reflecting: asyncio.Task[object] | None = None
        self._thread: threading.Thread | None = None
        self._said: RegistryReading | None = None

    def look(self) -> RegistryReading | None:
        with self._changed:
            self._begin()
            self._changed.wait_for(lambda: self._is_closed or self._failure() or self._is_synced, self._begin_s)
            if self._is_closed:
                raise KubernetesFailed("unreachable", f"{self._config.base}: no longer asked")
            if (failure := self._failure()) is not None:
                raise failure.with_traceback(None)  # which grows with each look
            if not self._is_synced:
                raise KubernetesFailed("late", f"{self._config.base}: not all Pods were listed in {self._begin_s:g} s")
            reading = self._listing.reading()
        if reading is self._said or reading == self._said:
            return None
        self._said = reading
        return reading

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
            self._listing, self._states, self._followed = self._new_listing(), {}, 0
        collections = list(self._collections())
        with self._changed:
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

    def _new_listing(self) -> KubernetesListing:
        return KubernetesListing(self._config.readiness, self._config.agent_port, self._server_port)

    def _collections(self) -> Iterator[Collection[Any]]:
        listing, config = self._listing, self._config
        for namespace in config.namespaces or (self._own_namespace(),):
            yield Collection(
                path=f"/api/v1/namespaces/{namespace}/pods",
                selector=config.selector,
                kind=Pod,
                listed=self._to(listing.list_pods, namespace),
                put=self._to(listing.put_pod, namespace),
                deleted=self._to(listing.delete_pod, namespace),
            )
            if config.services:
                yield Collection(
                    path=f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
                    selector=f"{SERVICE_LABEL} in ({','.join(config.services)})",
                    kind=EndpointSlice,
                    listed=self._to(listing.list_slices, namespace),
                    put=self._to(listing.put_slice, namespace),
                    deleted=self._to(listing.delete_slice, namespace),
                )

    def _to(self, tell: Callable[[str, T], None], namespace: str) -> Callable[[T], None]:
        """Tells the listing, while no look reads it."""

        def told(found: T) -> None:
            with self._changed:
                tell(namespace, found)

        return told

    def _own_namespace(self) -> str:
        path = self._config.token_file.with_name(NAMESPACE_FILE)
        try:
            name = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise KubernetesFailed("unreadable", f"namespaces are not named, and {path}: {error}") from error
        if not NAME.fullmatch(name):
            raise KubernetesFailed("unreadable", f"namespaces are not named, and {path} names none: {shown(name)!r}")
        return name

    def _state(self, path: str, state: KubernetesFailed | None) -> None:
        with self._changed:
            self._states[path] = state
            self._changed.notify_all()
