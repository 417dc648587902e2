"""A registry in etcd, as gateways read it: all keys at one revision, then each change, for as long as the watch lasts.

A watch that has ended, or is silent, is begun anew with all keys: so a compaction loses nothing. While etcd cannot be read,
tries come at growing distances.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from membership.backoff import Backoff
from membership.errors import EtcdFailed, SourceFailed
from membership.etcd.client import EtcdClient
from membership.etcd.listing import MAX_NAME_CHARS, EtcdListing
from membership.etcd.pages import BEGIN_S, key_range, name_of, read_all, stored, too_many
from membership.etcd.settings import EtcdConfig
from membership.etcd.watching import EtcdWatch
from membership.sources import MAX_ENTRIES
from membership.view import RegistryReading
from transport.control.proto.etcd_pb2 import WatchEvent, WatchResponse

ASK_S: Final = 3.0  # without a word from etcd
ANSWER_S: Final = 5.0  # after which a connection that says nothing is taken for dead


class EtcdSource:
    """See `membership.sources.Source`."""

    name = "etcd"

    def __init__(
        self,
        config: EtcdConfig,
        clock: Callable[[], float] = time.monotonic,
        rng: np.random.Generator | None = None,
        client: EtcdClient | None = None,
    ) -> None:
        self._root = config.root
        self._clock = clock
        self._client = client or EtcdClient(config)
        self._backoff = Backoff(rng or np.random.default_rng())
        self._listing = EtcdListing(config.root)
        self._watch: EtcdWatch | None = None
        self._has_worked = False  # the watch has said more than that it begins
        self._cluster = 0
        self._heard_at = 0.0
        self._asked_at: float | None = None  # for progress, and nothing has come since
        self._try_at = 0.0
        self._failure: SourceFailed | None = None
        self._said: RegistryReading | None = None

    def look(self) -> RegistryReading | None:
        now = self._clock()
        if self._failure is not None and now < self._try_at:
            raise self._failure
        try:
            self._follow(now)
        except SourceFailed as failure:
            if self._watch is not None:
                self._end_watch()
                self._client.leave_endpoint()
            self._failure, self._try_at = failure, now + self._backoff.failed()
            raise
        self._failure = None
        reading = self._listing.reading(now)
        if reading is self._said or reading == self._said:
            return None
        self._said = reading
        return reading

    def close(self) -> None:
        self._end_watch()
        self._client.close()

    def _follow(self, now: float) -> None:
        """Takes what has changed; begins anew at another endpoint where a watch has ended that worked."""
        if self._watch is not None:
            try:
                self._take(self._watch, now)
                return
            except EtcdFailed:
                if not self._has_worked:
                    raise
                self._end_watch()
                self._client.leave_endpoint()
        self._begin(now)

    def _begin(self, now: float) -> None:
        until = time.monotonic() + BEGIN_S
        snapshot = read_all(self._client, self._root, until)
        begin, end = key_range(self._root)
        watch = self._watch = self._client.watch(begin, end, snapshot.revision + 1)
        self._has_worked = False
        answer = watch.first(until - time.monotonic())
        self._cluster = snapshot.cluster
        self._check(answer)
        self._listing.snapshot(snapshot, now)
        self._heard(now)
        self._apply(answer, now)

    def _take(self, watch: EtcdWatch, now: float) -> None:
        for answer in watch.take():
            self._check(answer)
            self._heard(now)
            self._apply(answer, now)
            self._has_worked = True
            self._backoff.succeeded()
        if self._asked_at is not None:
            if now - self._asked_at > ANSWER_S:
                raise EtcdFailed("late", f"{self._client.where}: no answer for {ANSWER_S:g} s")
        elif now - self._heard_at > ASK_S:
            self._asked_at = now
            watch.ask_progress()

    def _heard(self, now: float) -> None:
        self._heard_at, self._asked_at = now, None

    def _check(self, answer: WatchResponse) -> None:
        where = self._client.where
        if answer.canceled and answer.compact_revision:
            raise EtcdFailed("late", f"{where}: it forgets what has changed faster than it is read")
        if answer.canceled:
            raise EtcdFailed("denied", f"{where}: it ends the watch: {answer.cancel_reason[:MAX_NAME_CHARS]}")
        if answer.header.cluster_id != self._cluster:
            raise EtcdFailed("unreachable", f"{where}: these are endpoints of more than one etcd")

    def _apply(self, answer: WatchResponse, now: float) -> None:
        self._listing.saw(answer.header.revision)
        for event in answer.events:
            if event.type == WatchEvent.DELETE:
                self._listing.delete(name_of(event.kv, self._root), event.kv.mod_revision, now)
            else:
                self._listing.put(stored(event.kv, self._root), now)
        if len(self._listing) > MAX_ENTRIES:
            raise too_many(self._client, self._root)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
