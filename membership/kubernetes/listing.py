"""What Pods and EndpointSlices come to as members. The same objects give the same members, in whatever order they came."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from membership.errors import KubernetesFailed
from membership.kubernetes.objects import EndpointSlice, Pod
from membership.kubernetes.pods import UnusablePod, is_ending, is_ready, members_of
from membership.member import Member
from membership.sources import MAX_ENTRIES
from membership.view import RegistryReading

MAX_SLICES: Final = 1024
MAX_ENDPOINTS: Final = 16 * 1024  # of all slices together
MAX_PROBLEMS: Final = 32


@dataclass(frozen=True, slots=True)
class _Seen:
    """A Pod, as far as it counts: nothing, if it has no address yet. `since` and `place` say which of two comes later."""

    since: str
    place: str
    found: tuple[Member | UnusablePod, ...]
    is_ending: bool
    is_ready: bool

    @property
    def order(self) -> tuple[str, str]:
        return self.since, self.place


class KubernetesListing:
    """The objects of all namespaces, by uid. `readiness` is that of the settings; ports are as in `members_of`."""

    def __init__(self, readiness: str = "agent", agent_port: int = 0, server_ports: Sequence[int] = ()) -> None:
        self._readiness = readiness
        self._agent_port = agent_port
        self._server_ports = server_ports
        self._pods: dict[str, dict[str, _Seen]] = {}  # by namespace and uid
        self._serving: dict[str, dict[str, frozenset[str]]] = {}  # uids of Pods, by namespace and uid of a slice
        self._is_empty_meant = False
        self._reading: RegistryReading | None = None  # until something differs

    def list_pods(self, namespace: str, pods: Iterable[Pod]) -> None:
        """All Pods of a namespace were read anew."""
        before = self._used(namespace)
        self._pods[namespace] = {pod.metadata.uid: self._seen(pod) for pod in pods}
        self._bound_pods()
        now = self._used(namespace)
        self._differs(is_meant=self._is_empty_meant and before <= now)

    def put_pod(self, namespace: str, pod: Pod) -> None:
        """A Pod is there, or is another now."""
        uid, pods = pod.metadata.uid, self._pods.setdefault(namespace, {})
        was_used = self._is_used(pods.get(uid))
        seen = pods[uid] = self._seen(pod)
        self._bound_pods()
        if was_used and not self._is_used(seen):
            self._differs(is_meant=seen.is_ending)
        else:  # the last one may have been unready when it was told to end
            self._differs(is_meant=self._is_empty_meant or (seen.is_ending and self._are_all_ending()))

    def delete_pod(self, namespace: str, pod: Pod) -> None:
        """A Pod is gone, or the selector chooses it no more, as it shows by having no time of deletion."""
        seen = self._pods.get(namespace, {}).pop(pod.metadata.uid, None)
        was_used = self._is_used(seen)
        self._differs(is_meant=is_ending(pod) if was_used else self._is_empty_meant)

    def list_slices(self, namespace: str, slices: Iterable[EndpointSlice]) -> None:
        """All EndpointSlices of a namespace were read anew."""
        self._serving[namespace] = {each.metadata.uid: _serving(each) for each in slices}
        self._slices_differ()

    def put_slice(self, namespace: str, endpoints: EndpointSlice) -> None:
        self._serving.setdefault(namespace, {})[endpoints.metadata.uid] = _serving(endpoints)
        self._slices_differ()

    def delete_slice(self, namespace: str, endpoints: EndpointSlice) -> None:
        self._serving.get(namespace, {}).pop(endpoints.metadata.uid, None)
        self._slices_differ()

    def reading(self) -> RegistryReading:
        """What it comes to. Of two Pods with one identity the later one counts."""
        if self._reading is None:
            self._reading = self._read()
        return self._reading

    def _read(self) -> RegistryReading:
        members: dict[str, Member] = {}
        problems: list[UnusablePod] = []
        used = sorted(self._all_used(), key=lambda each: each.order, reverse=True)
        for place, found in ((each.place, found) for each in used for found in each.found):
            if isinstance(found, UnusablePod):
                problems.append(found)
                continue
            later = members.setdefault(found.id, found)
            if later is not found:
                text = f"{place}: a later Pod is {later.id}, too, at {later.agent}"
                problems.append(UnusablePod("identity", text))
        problems.reverse()
        texts = [problem.text for problem in problems]
        if len(texts) > MAX_PROBLEMS:
            texts[MAX_PROBLEMS:] = [f"{len(texts) - MAX_PROBLEMS} more Pods that cannot be used"]
        return RegistryReading(
            members=tuple(sorted(members.values(), key=lambda member: member.id)),
            problems=tuple(texts),
            left_out=Counter(problem.reason for problem in problems),
            is_empty_meant=self._is_empty_meant and not members,
        )

    def _all_used(self) -> list[_Seen]:
        serving = self._ready_uids()
        return [
            seen
            for pods in self._pods.values()
            for uid, seen in pods.items()
            if self._is_used(seen) and (serving is None or uid in serving)
        ]

    def _ready_uids(self) -> set[str] | None:
        """None: endpoints do not count."""
        if self._readiness != "endpoints":
            return None
        return {uid for slices in self._serving.values() for uids in slices.values() for uid in uids}

    def _used(self, namespace: str) -> set[str]:
        return {uid for uid, seen in self._pods.get(namespace, {}).items() if self._is_used(seen)}

    def _are_all_ending(self) -> bool:
        return all(seen.is_ending for pods in self._pods.values() for seen in pods.values())

    def _is_used(self, seen: _Seen | None) -> bool:
        """Whether it counts by what it says itself."""
        return seen is not None and bool(seen.found) and not seen.is_ending and seen.is_ready

    def _seen(self, pod: Pod) -> _Seen:
        return _Seen(
            since=pod.metadata.creation_timestamp,
            place=f"{pod.metadata.namespace}/{pod.metadata.name}",
            found=members_of(pod, self._agent_port, self._server_ports) if pod.status.pod_ip else (),
            is_ending=is_ending(pod),
            is_ready=self._readiness != "pod" or is_ready(pod),
        )

    def _slices_differ(self) -> None:
        """Pods that are not served any more have not left by that."""
        slices = [uids for each in self._serving.values() for uids in each.values()]
        if len(slices) > MAX_SLICES or sum(map(len, slices)) > MAX_ENDPOINTS:
            raise KubernetesFailed("too_many", f"services have more than {MAX_ENDPOINTS} endpoints")
        self._differs(is_meant=self._is_empty_meant and not any(map(self._used, self._pods)))

    def _differs(self, *, is_meant: bool) -> None:
        self._reading = None
        self._is_empty_meant = is_meant

    def _bound_pods(self) -> None:
        if sum(map(len, self._pods.values())) > MAX_ENTRIES:
            raise KubernetesFailed("too_many", f"the selector chooses more than {MAX_ENTRIES} Pods")


def _serving(slices: EndpointSlice) -> frozenset[str]:
    """The Pods that it says are served. What it does not say counts as yes, as the API has it."""
    return frozenset(
        each.target_ref.uid
        for each in slices.endpoints or ()
        if each.target_ref is not None
        and each.target_ref.kind == "Pod"
        and not each.conditions.terminating
        and (each.conditions.ready is not False if each.conditions.serving is None else each.conditions.serving)
    )
