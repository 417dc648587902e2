"""A registry in Kubernetes, as gateways read it: Pods by label, and the EndpointSlices of services.

It is as good as its worst collection: where one namespace cannot be read, the view is frozen as a whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from membership.kubernetes.following import CollectionFollower, own_namespace
from membership.kubernetes.listing import KubernetesListing
from membership.kubernetes.objects import EndpointSlice, Pod
from membership.kubernetes.reflector import REFLECTOR_TIMES, Collection, ReflectorTimes
from membership.kubernetes.settings import KUBERNETES, KubernetesConfig
from membership.view import RegistryReading

BEGIN_S: Final = 4.5  # that a look waits for all lists; a registry counts as lost after LATE_S of MembershipWatch
SERVICE_LABEL: Final = "kubernetes.io/service-name"


class KubernetesSource:
    """See `membership.sources.Source`. With `server_ports`, Pods are model servers that answer there."""

    name = KUBERNETES

    def __init__(
        self,
        config: KubernetesConfig,
        clock: Callable[[], float] = time.monotonic,
        rng: np.random.Generator | None = None,
        begin_s: float = BEGIN_S,
        times: ReflectorTimes = REFLECTOR_TIMES,
        server_ports: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._server_ports = server_ports
        self._listing = self._new_listing()
        rng = rng or np.random.default_rng()
        self._follower = CollectionFollower(config, self._begin, clock, rng, begin_s, times, "Pods")
        self._said: RegistryReading | None = None

    def look(self) -> RegistryReading | None:
        with self._follower.known():
            reading = self._listing.reading()
        if reading is self._said or reading == self._said:
            return None
        self._said = reading
        return reading

    def close(self) -> None:
        self._follower.close()

    def _begin(self) -> Sequence[Collection[Any]]:
        self._listing = self._new_listing()
        return list(self._collections())

    def _new_listing(self) -> KubernetesListing:
        return KubernetesListing(self._config.readiness, self._config.agent_port, self._server_ports)

    def _collections(self) -> Iterator[Collection[Any]]:
        listing, config, told = self._listing, self._config, self._follower.told
        for namespace in config.namespaces or (own_namespace(config),):
            yield Collection(
                path=f"/api/v1/namespaces/{namespace}/pods",
                selector=config.selector,
                kind=Pod,
                listed=told(partial(listing.list_pods, namespace)),
                put=told(partial(listing.put_pod, namespace)),
                deleted=told(partial(listing.delete_pod, namespace)),
            )
            if config.services:
                yield Collection(
                    path=f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
                    selector=f"{SERVICE_LABEL} in ({','.join(config.services)})",
                    kind=EndpointSlice,
                    listed=told(partial(listing.list_slices, namespace)),
                    put=told(partial(listing.put_slice, namespace)),
                    deleted=told(partial(listing.delete_slice, namespace)),
                )
