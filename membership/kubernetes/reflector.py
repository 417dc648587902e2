"""Follows one collection of the API server: all objects page by page, then each change from there on.

A watch that ends is begun again where it was. Where the API server has forgotten what came since, and every so often, all
objects are read anew. While it cannot be asked, tries come at growing distances. So they do where it takes what it was
asked and ends it at once.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from membership.backoff import Backoff
from membership.errors import KubernetesFailed
from membership.kubernetes.client import CALL_S, ApiClient, RelistNeeded, name_of
from membership.kubernetes.objects import GONE, ApiStatus, Bookmark, Metadata, Page, RawEvent, shown
from membership.sources import MAX_ENTRIES

PAGE_OBJECTS: Final = 250
MAX_EMPTY_PAGES: Final = 16
OF_CONNECTION: Final = ("unreachable", "late")
OF_OBJECTS: Final = ("too_many", "too_long", "malformed", "refused")  # then all is read anew
NO_VERSIONS: Final = ("", "0")  # no watch can begin after them: they stand for any that the API server has
SHORT_S: Final = 1.0  # a watch that ends earlier is not begun again at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectorTimes:
    """`watch_s` is how long a watch lasts, between two bounds: a server that hangs is seen by its not ending `late_s` later.
    All else is answered within `call_s`.

    After `relist_s` all is read anew: a server that was restored may tell nothing of what it has lost.
    """

    watch_s: tuple[float, float] = (40.0, 60.0)
    late_s: float = 10.0
    call_s: float = CALL_S
    relist_s: float = 600.0


REFLECTOR_TIMES: Final = ReflectorTimes()


class HasMetadata(Protocol):
    @property
    def metadata(self) -> Metadata: ...


T = TypeVar("T", bound=HasMetadata)
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection(Generic[T]):
    """What is followed: `kind` at `path`, those that `selector` chooses, or the one that has a `name`.

    What is found is told to the other three.
    """

    path: str
    selector: str = ""
    name: str = ""
    kind: type[T]
    listed: Callable[[Sequence[T]], None]
    put: Callable[[T], None]
    deleted: Callable[[T], None]

    @property
    def params(self) -> dict[str, str]:
        """What the API server is asked for."""
        return {"fieldSelector": f"metadata.name={self.name}"} if self.name else {"labelSelector": self.selector}


class Reflector(Generic[T]):
    """Tells `on_state` None whenever all is known, and otherwise why it is not."""

    def __init__(
        self,
        client: ApiClient,
        collection: Collection[T],
        on_state: Callable[[KubernetesFailed | None], None],
        clock: Callable[[], float],
        rng: np.random.Generator,
        times: ReflectorTimes = REFLECTOR_TIMES,
    ) -> None:
        self._client = client
        self._of = collection
        self._on_state = on_state
        self._clock = clock
        self._rng = rng
        self._times = times
        self._pauses = Backoff(rng)
        self._version = ""  # what has been seen; "": nothing yet
        self._listed_at = -math.inf
        self._watching_since: float | None = None
        self._page_type: Any = Page[collection.kind]  # type: ignore[name-defined]

    async def run(self) -> None:
        """For ever."""
        while True:
            began_at, self._watching_since = self._clock(), None
            try:
                if not self._version or began_at - self._listed_at > self._times.relist_s:
                    await self._list()
                await self._watch()
                pause_s = self._pause_s()
            except RelistNeeded:
                self._version = ""
                is_old = self._listed_at < began_at  # else it has forgotten what it has just listed
                pause_s = 0.0 if is_old else self._pauses.failed()
            except KubernetesFailed as failure:
                pause_s = self._failed(failure)
            await asyncio.sleep(pause_s)

    def _failed(self, failure: KubernetesFailed) -> float:
        """A watch that was cut off is no failure if it can be begun again."""
        if self._watching_since is not None and failure.reason in OF_CONNECTION:
            return self._pause_s()
        self._on_state(failure)
        if failure.reason in OF_OBJECTS:
            self._version = ""
        return max(self._pauses.failed(), failure.again_s)

    def _pause_s(self) -> float:
        """After a watch has ended: none, if it lasted."""
        assert self._watching_since is not None
        if self._clock() - self._watching_since < SHORT_S:
            return self._pauses.failed()
        self._pauses.succeeded()
        return 0.0

    async def _list(self) -> None:
        """Page by page. If what it lists is forgotten meanwhile, that is a failure, and all begins anew."""
        found: list[T] = []
        params = {**self._of.params, "limit": str(PAGE_OBJECTS)}
        for pages in itertools.count(1):
            try:
                page = await self._page(params)
            except RelistNeeded as error:
                self._version = ""
                raise KubernetesFailed("late", str(error)) from error
            found += page.items or ()
            if len(found) > MAX_ENTRIES:
                raise KubernetesFailed("too_many", f"{self._where}: more than {MAX_ENTRIES} objects")
            if pages > len(found) + MAX_EMPTY_PAGES:
                raise KubernetesFailed("too_many", f"{self._where}: {pages} pages have {len(found)} objects")
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        if page.metadata.resource_version in NO_VERSIONS:
            raise KubernetesFailed("malformed", f"{self._where}: a list without a resourceVersion")
        self._of.listed(found)
        self._version, self._listed_at = page.metadata.resource_version, self._clock()

    async def _page(self, params: dict[str, str]) -> Page[T]:
        """A page that is too long is asked for again as smaller ones."""
        while True:
            try:
                body = await self._client.page(self._of.path, params)
                page: Page[T] = self._decoded(body, self._page_type)
                return page
            except KubernetesFailed as failure:
                limit = int(params["limit"])
                if failure.reason != "too_long" or limit == 1:
                    raise
                params["limit"] = str(max(1, limit // 4))

    async def _watch(self) -> None:
        params = {
            **self._of.params,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
        }
        watch_s = float(self._rng.uniform(*self._times.watch_s))
        async with self._client.watch(self._of.path, params, watch_s, self._times.late_s) as lines:
            self._watching_since = self._clock()
            self._on_state(None)
            async for line in lines:
                self._take(self._decoded(line, RawEvent))
                self._pauses.succeeded()

    def _take(self, event: RawEvent) -> None:
        match event.type:
            case "ADDED" | "MODIFIED":
                changed = self._decoded(event.object, self._of.kind)
                self._of.put(changed)
                self._version = changed.metadata.resource_version
            case "DELETED":
                gone = self._decoded(event.object, self._of.kind)
                self._of.deleted(gone)
                self._version = gone.metadata.resource_version
            case "BOOKMARK":
                self._version = self._decoded(event.object, Bookmark).metadata.resource_version
            case "ERROR":
                status = self._decoded(event.object, ApiStatus)
                if status.code == GONE:
                    raise RelistNeeded(status.message)
                raise KubernetesFailed("refused", f"{self._where}: the watch has failed: {shown(status.message)}")

    @property
    def _where(self) -> str:
        return f"{self._client.where}: {name_of(self._of.path)}"

    def _decoded(self, body: bytes | msgspec.Raw, kind: type[V]) -> V:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise KubernetesFailed("malformed", f"{self._where}: it cannot be read: {error}") from error
