"""The model servers of an InferencePool: the object is followed, and so are the Pods that it chooses.

pool is seen ──► Pods that are ready are servers, one for each target port
  └ another selector, or other ports ──► Pods are followed anew; until all are listed, servers stay as they were
pool is gone ──► servers stay as they were, and the view says why
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from membership.errors import KubernetesFailed
from membership.kubernetes.following import CollectionFollower, own_namespace
from membership.kubernetes.objects import InferencePool
from membership.kubernetes.pools import PoolChoice, choice_of
from membership.kubernetes.reflector import REFLECTOR_TIMES, Collection, ReflectorTimes
from membership.kubernetes.settings import KUBERNETES, InferencePoolConfig
from membership.kubernetes.source import BEGIN_S, KubernetesSource
from membership.view import RegistryReading

GROUP: Final = "inference.networking.k8s.io/v1"


class InferencePoolSource:
    """See `membership.sources.Source`."""

    name = KUBERNETES

    def __init__(
        self,
        config: InferencePoolConfig,
        clock: Callable[[], float] = time.monotonic,
        rng: np.random.Generator | None = None,
        begin_s: float = BEGIN_S,
        times: ReflectorTimes = REFLECTOR_TIMES,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng or np.random.default_rng()
        self._begin_s = begin_s / 2  # a look may wait for the pool, and for its Pods
        self._times = times
        self._namespace = config.namespace
        self._pool: InferencePool | None = None
        self._follower = CollectionFollower(
            config, self._begin, clock, self._rng, self._begin_s, times, "InferencePools"
        )
        self._lock = threading.Lock()  # of what follows
        self._is_closed = False
        self._choice: PoolChoice | None = None  # by which `_pods` are followed
        self._pods: KubernetesSource | None = None

    def look(self) -> RegistryReading | None:
        with self._follower.known():
            namespace, pool = self._namespace, self._pool
        if pool is None:
            raise KubernetesFailed("missing", f"there is no InferencePool {namespace}/{self._config.name}")
        return self._pods_of(choice_of(pool), namespace).look()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            pods = self._pods
        self._follower.close()
        if pods is not None:
            pods.close()

    def _pods_of(self, choice: PoolChoice, namespace: str) -> KubernetesSource:
        with self._lock:
            if self._pods is not None and choice == self._choice:
                return self._pods
            if self._is_closed:
                raise KubernetesFailed("unreachable", f"{self._config.base}: no longer asked")
            before, self._choice = self._pods, choice
            pods = self._pods = KubernetesSource(
                self._config.pods(choice.selector, namespace),
                self._clock,
                self._rng.spawn(1)[0],
                self._begin_s,
                self._times,
                choice.ports,
            )
        if before is not None:
            before.close()
        return pods

    def _begin(self) -> Sequence[Collection[Any]]:
        self._pool = None
        self._namespace = self._config.namespace or own_namespace(self._config)
        pools = Collection(
            path=f"/apis/{GROUP}/namespaces/{self._namespace}/inferencepools",
            name=self._config.name,
            kind=InferencePool,
            listed=self._follower.told(self._listed),
            put=self._follower.told(self._put),
            deleted=self._follower.told(self._deleted),
        )
        return [pools]

    def _listed(self, pools: Sequence[InferencePool]) -> None:
        self._pool = next(iter(pools), None)

    def _put(self, pool: InferencePool) -> None:
        self._pool = pool

    def _deleted(self, _: InferencePool) -> None:
        self._pool = None
