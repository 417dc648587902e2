"""Whatever the order of events, members are those of the last list."""

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membership.errors import KubernetesFailed
from membership.kubernetes.listing import KubernetesListing
from membership.kubernetes.objects import (
    EndpointConditions,
    EndpointSlice,
    Metadata,
    Pod,
    PodCondition,
    PodStatus,
    ServiceEndpoint,
    TargetRef,
)
from membership.sources import MAX_ENTRIES
from membership.view import RegistryReading


def pod(
    uid: str,
    name: str = "",
    *,
    ends: bool = False,
    ready: bool = True,
    address: str = "",
    role: str = "",
    identity: str = "",
) -> Pod:
    return Pod(
        metadata=Metadata(
            name=name or uid, namespace="llm", uid=uid, deletion_timestamp="now" if ends else None,
            labels={"prfaas/role": role, "prfaas/node-id": identity},
            creation_timestamp=f"2026-01-01T00:00:{uid[-1:]}Z",
        ),
        status=PodStatus(
            phase="Running", pod_ip=address or f"10.0.0.{int(uid[-1:], 16) + 1}",
            conditions=[PodCondition(type="Ready", status=str(ready))],
        ),
    )  # fmt: skip


def slices(uid: str, *uids: str, **conditions: bool) -> EndpointSlice:
    said = EndpointConditions(**conditions)
    return EndpointSlice(
        metadata=Metadata(name=uid, uid=uid),
        endpoints=[ServiceEndpoint(conditions=said, target_ref=TargetRef(kind="Pod", uid=each)) for each in uids],
    )


def ids(listing: KubernetesListing) -> list[str]:
    return [member.id for member in listing.reading().members]


def listed(readiness: str, pods: Iterable[Pod], served: Iterable[EndpointSlice] = ()) -> RegistryReading:
    listing = KubernetesListing(readiness, 7001)
    listing.list_pods("llm", pods)
    listing.list_slices("llm", served)
    return listing.reading()


@dataclass(frozen=True)
class Step:
    uid: str
    now: Pod | EndpointSlice | None  # None: it is gone
    is_list: bool


UIDS = st.sampled_from([f"u{number}" for number in range(6)])
PODS = st.builds(
    pod, UIDS, st.sampled_from(["", "a", "b"]), ends=st.booleans(), ready=st.booleans(),
    role=st.sampled_from(["", "prefill", "banana"]),
)  # fmt: skip
SLICES = st.builds(slices, st.sampled_from(["s0", "s1"]), UIDS, UIDS, serving=st.booleans())
STEPS = st.lists(
    st.one_of(
        st.builds(lambda each, is_list: Step(each.metadata.uid, each, is_list), st.one_of(PODS, SLICES), st.booleans()),
        st.builds(lambda uid: Step(uid, None, False), st.one_of(UIDS, st.sampled_from(["s0", "s1"]))),
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from(["agent", "pod", "endpoints"]))
def test_events_and_lists_come_to_what_a_list_at_the_end_says(steps: list[Step], readiness: str) -> None:
    listing = KubernetesListing(readiness, 7001)
    pods, served = dict[str, Pod](), dict[str, EndpointSlice]()
    for step in steps:
        match step.now:
            case Pod() as now:
                pods[step.uid] = now
                listing.list_pods("llm", pods.values()) if step.is_list else listing.put_pod("llm", now)
            case EndpointSlice() as now:
                served[step.uid] = now
                listing.list_slices("llm", served.values()) if step.is_list else listing.put_slice("llm", now)
            case None if (gone := pods.pop(step.uid, None)) is not None:
                listing.delete_pod("llm", gone)
            case None if (ended := served.pop(step.uid, None)) is not None:
                listing.delete_slice("llm", ended)
    found, wanted = listing.reading(), listed(readiness, pods.values(), served.values())
    assert (found.members, found.problems, found.left_out) == (wanted.members, wanted.problems, wanted.left_out)
    assert not (found.is_empty_meant and found.members)


@given(st.lists(PODS, unique_by=lambda each: each.metadata.uid), st.randoms())
def test_pods_may_come_in_any_order(pods: list[Pod], chance: Random) -> None:
    listing = KubernetesListing("agent", 7001)
    for each in chance.sample(pods, len(pods)):
        listing.put_pod("llm", each)
    assert listing.reading().members == listed("agent", pods).members


def test_of_two_pods_with_one_identity_the_later_one_counts() -> None:
    reading = listed("agent", [pod("u2", "b", identity="n"), pod("u1", "a", identity="n")])
    assert [member.agent for member in reading.members] == ["10.0.0.3:7001"]
    assert reading.problems == ("llm/a: a later Pod is n, too, at 10.0.0.3:7001",)
    assert reading.left_out == {"identity": 1}


@pytest.mark.parametrize("readiness", ["agent", "pod", "endpoints"])
def test_an_empty_list_is_meant_only_where_pods_were_told_to_end(readiness: str) -> None:
    listing = KubernetesListing(readiness, 7001)
    listing.list_pods("llm", [pod("u1"), pod("u2")])
    listing.list_slices("llm", [slices("s0", "u1", "u2")])
    listing.delete_pod("llm", pod("u1"))  # the selector chooses it no more
    assert (ids(listing), listing.reading().is_empty_meant) == (["u2"], False)
    listing.put_pod("llm", pod("u2", ends=True))
    assert (ids(listing), listing.reading().is_empty_meant) == ([], True)
    listing.list_pods("llm", [])
    assert listing.reading().is_empty_meant
    listing.put_pod("llm", pod("u3"))
    listing.put_slice("llm", slices("s0", "u3"))
    listing.list_pods("llm", [])
    assert not listing.reading().is_empty_meant


def test_a_pod_that_was_not_ready_may_be_the_last_one_that_is_told_to_end() -> None:
    listing = KubernetesListing("pod", 7001)
    listing.list_pods("llm", [pod("u1"), pod("u2")])
    listing.put_pod("llm", pod("u1", ready=False))
    listing.put_pod("llm", pod("u2", ready=False))
    listing.put_pod("llm", pod("u1", ready=False, ends=True))
    assert not listing.reading().is_empty_meant
    listing.put_pod("llm", pod("u2", ready=False, ends=True))
    assert listing.reading().is_empty_meant
    listing.delete_pod("llm", pod("u2", ready=False, ends=True))
    assert listing.reading().is_empty_meant


def test_pods_that_are_served_no_more_have_not_left() -> None:
    listing = KubernetesListing("endpoints", 7001)
    listing.list_pods("llm", [pod("u1"), pod("u2")])
    listing.list_slices("llm", [slices("s0", "u1", "u2")])
    listing.put_pod("llm", pod("u1", ends=True))
    listing.delete_slice("llm", slices("s0"))
    assert (ids(listing), listing.reading().is_empty_meant) == ([], False)


def test_what_endpoints_do_not_say_counts_as_yes() -> None:
    told = [({}, ["u1"]), ({"ready": False}, []), ({"ready": True, "serving": False}, []), ({"serving": True}, ["u1"])]
    for conditions, wanted in told:
        reading = listed("endpoints", [pod("u1")], [slices("s0", "u1", **conditions)])
        assert [member.id for member in reading.members] == wanted


def test_pods_have_a_bound() -> None:
    listing = KubernetesListing("agent", 7001)
    many = [pod(f"u{number:05}1", address="10.0.0.1") for number in range(MAX_ENTRIES + 1)]
    with pytest.raises(KubernetesFailed, match="more than 8192 Pods"):
        listing.list_pods("llm", many)


def test_many_problems_are_told_in_short() -> None:
    reading = listed("agent", [pod(f"u{number:03}1", role="banana") for number in range(100)])
    assert (len(reading.problems), reading.problems[-1]) == (33, "68 more Pods that cannot be used")
    assert reading.left_out == {"role": 100}
