"""What Pods say of nodes."""

import pytest

from membership.kubernetes.objects import Container, ContainerPort, Metadata, Pod, PodSpec, PodStatus
from membership.kubernetes.pods import UnusablePod, member_of
from membership.member import Member


def pod(
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    address: str = "10.0.0.7",
    **spec: str,
) -> Pod:
    return Pod(
        metadata=Metadata(name="d-0", namespace="llm", uid="1", labels=labels, annotations=annotations),
        spec=PodSpec(
            containers=[Container(ports=[ContainerPort(container_port=7001, name="control")])],
            **spec,
        ),
        status=PodStatus(phase="Running", pod_ip=address),
    )


def test_a_pod_without_labels_is_a_node_that_says_all_itself() -> None:
    assert member_of(pod()) == Member(id="d-0", agent="10.0.0.7:7001")


def test_a_pod_of_a_headless_service_has_the_name_that_its_certificate_carries() -> None:
    assert member_of(pod(hostname="d-0", subdomain="d")) == Member(
        id="d-0", agent="10.0.0.7:7001", name="d-0.d.llm.svc"
    )


def test_a_certificate_may_carry_another_subdomain_than_that_of_the_service() -> None:
    found = member_of(
        pod(annotations={"prfaas/certificate-subdomain": "site"}, hostname="d-0", subdomain="site-0-ab12-d")
    )
    assert found == Member(id="d-0", agent="10.0.0.7:7001", name="d-0.site.llm.svc")


def test_everything_that_can_be_said() -> None:
    labels = {
        "app": "prfaas", "prfaas/role": "prefill", "prfaas/cluster": "west", "prfaas/pool": "p",
        "topology.kubernetes.io/region": "eu",
    }  # fmt: skip
    annotations = {
        "prfaas/role": "decode", "prfaas/node-id": "n", "prfaas/agent-port": "7009", "prfaas/revision": "r2",
        "prfaas/certificate-name": "n.example", "prfaas/layout": "l", "prfaas/config": "abc", "other": "x",
    }  # fmt: skip
    assert member_of(pod(labels, annotations, "fd00::7", node_name="m1")) == Member(
        id="n",
        agent="[fd00::7]:7009",
        name="n.example",
        cluster="west",
        role="decode",
        revision="r2",
        labels={
            "prfaas/pool": "p",
            "prfaas/layout": "l",
            "topology.kubernetes.io/region": "eu",
            "kubernetes.io/hostname": "m1",
        },
    )


def test_model_servers_answer_where_they_are_said_to() -> None:
    found = member_of(pod(annotations={"prfaas/agent-port": "7009"}), server_port=8000)
    assert found == Member(id="d-0", agent="10.0.0.7:8000")


def test_a_picker_is_told_which_model_servers_are_nodes_of_ours() -> None:
    found = member_of(pod({"prfaas/role": "prefill"}), server_port=8000)
    assert found == Member(id="d-0", agent="10.0.0.7:8000", role="prefill", labels={"prfaas/role": "prefill"})
    found = member_of(pod({"llm-d.ai/role": "prefill"}), server_port=8000)
    assert found == Member(id="d-0", agent="10.0.0.7:8000", role="prefill")


@pytest.mark.parametrize(
    ("role", "wanted"),
    [("prefill", "prefill"), ("decode", "decode"), ("prefill-decode", ""), ("encode-prefill-decode", ""), ("", "")],
)
def test_roles_of_llm_d(role: str, wanted: str) -> None:
    found = member_of(pod({"llm-d.ai/role": role}))
    assert isinstance(found, Member)
    assert found.role == wanted


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"llm-d.ai/role": "encode"}, "encode_only"),
        ({"prfaas/role": "banana"}, "role"),
        ({"prfaas/agent-port": "x"}, "malformed"),
        ({"prfaas/node-id": "a b"}, "malformed"),
    ],
)
def test_what_cannot_be_used_has_a_reason_and_names_the_pod(labels: dict[str, str], reason: str) -> None:
    found = member_of(pod(labels))
    assert isinstance(found, UnusablePod)
    assert found.reason == reason
    assert found.text.startswith("llm/d-0: ")


def test_an_agent_needs_a_port() -> None:
    bare = Pod(metadata=Metadata(name="d-0", namespace="llm"), status=PodStatus(pod_ip="10.0.0.7"))
    found = member_of(bare)
    assert isinstance(found, UnusablePod)
    assert found.reason == "port"
    assert member_of(bare, 7001) == Member(id="d-0", agent="10.0.0.7:7001")
