"""What gateways see of Kubernetes: the same of the double and of a real kube-apiserver."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from membership.errors import SourceFailed
from membership.kubernetes.source import KubernetesSource
from membership.view import RegistryReading, View
from tests.membership.etcd.servers import until
from tests.membership.kubernetes.servers import (
    READ,
    ApiUnderTest,
    Cluster,
    DoubledApi,
    config,
    needed_server,
    relayed,
)


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.long)])
def api(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ApiUnderTest]:
    server: ApiUnderTest = DoubledApi() if request.param == "double" else needed_server(tmp_path)
    try:
        server.start()
        server.allow("gateway", READ)
        yield server
    finally:
        server.close()


@pytest.fixture
def cluster(api: ApiUnderTest) -> Cluster:
    return Cluster(api)


class Watching:
    """A gateway's view of an API server."""

    def __init__(self, api: ApiUnderTest, folder: Path, **more: Any) -> None:
        self.source = KubernetesSource(config(api, folder, **more), rng=np.random.default_rng(1))
        self.view = View()
        self._said = RegistryReading()

    def look(self) -> View:
        try:
            reading = self.source.look()
        except SourceFailed as failure:
            self.view = self.view.failed(f"{failure.reason}: {failure}", 0.0)
        else:
            if reading is not None or self.view.frozen_since is not None:
                self._said = reading or self._said
                self.view = self.view.read(self._said, 0.0)
        return self.view

    def sees(self, *ids: str) -> None:
        until(lambda: self.look().state == "fresh" and {*self.view.members} == {*ids})

    def is_told(self, *words: str) -> None:
        until(lambda: all(word in self.look().reason for word in words))


@pytest.fixture
def gateway(api: ApiUnderTest, tmp_path: Path) -> Iterator[Watching]:
    watching = Watching(api, tmp_path)
    yield watching
    watching.source.close()


def test_pods_come_move_and_go(cluster: Cluster, gateway: Watching) -> None:
    gateway.sees()
    cluster.create("a")
    cluster.add("b", "10.0.0.2", 7002)
    cluster.create("stranger", labels={"app": "other"})
    gateway.sees("b")  # a has no address yet
    cluster.status("a", phase="Running", podIP="10.0.0.1", podIPs=[{"ip": "10.0.0.1"}])
    gateway.sees("a", "b")
    assert gateway.view.members["b"].agent == "10.0.0.2:7002"
    cluster.gone("b")
    gateway.sees("a")
    cluster.add("b", "10.0.0.3")
    gateway.sees("a", "b")
    assert gateway.view.members["b"].agent == "10.0.0.3:7001"


def test_a_pod_that_is_told_to_end_leaves_while_it_drains(cluster: Cluster, gateway: Watching) -> None:
    cluster.add("a")
    cluster.add("b")
    gateway.sees("a", "b")
    cluster.end("a")
    gateway.sees("b")
    cluster.end("b")
    gateway.sees()  # one after the other: that is meant
    cluster.gone("a")
    gateway.sees()


def test_labels_and_annotations_say_more(cluster: Cluster, gateway: Watching) -> None:
    cluster.add("a", labels={"prfaas/cluster": "west", "topology.kubernetes.io/zone": "z1"})
    gateway.sees("a")
    cluster.annotate("a", {"prfaas/capacity": "8 GPUs", "prfaas/agent-port": "7009", "prfaas/node-id": "n"})
    gateway.sees("n")
    member = gateway.view.members["n"]
    assert (member.agent, member.cluster, member.role) == ("127.0.0.1:7009", "west", "decode")
    assert member.labels == {
        "prfaas/capacity": "8 GPUs",
        "topology.kubernetes.io/zone": "z1",
        "kubernetes.io/hostname": "m1",
    }
    cluster.label("a", **{"prfaas/role": "banana"})
    until(lambda: gateway.look().left_out == {"role": 1})  # and stays: nothing else is listed
    assert (gateway.view.state, {*gateway.view.members}) == ("frozen", {"n"})


def test_an_api_server_that_is_killed_freezes_the_view_and_is_back(
    api: ApiUnderTest, cluster: Cluster, gateway: Watching
) -> None:
    cluster.add("a")
    gateway.sees("a")
    api.kill()
    gateway.is_told("unreachable", "the API server at", "connection refused")
    assert (gateway.view.state, {*gateway.view.members}) == ("frozen", {"a"})
    api.start()
    gateway.sees("a")
    cluster.add("b")
    gateway.sees("a", "b")


def test_changes_that_were_forgotten_while_the_way_was_cut_are_seen(
    api: ApiUnderTest, cluster: Cluster, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        cluster.add(name)
    with relayed(api.port) as relay:
        gateway = Watching(api, tmp_path, server=f"{api.base.partition(':')[0]}://127.0.0.1:{relay.port}")
        gateway.sees("a", "b")
        relay.cut()
        gateway.is_told("connection refused")
        cluster.gone("a")
        cluster.add("c")
        api.forget()
        assert {*gateway.look().members} == {"a", "b"}
        relay.mend()
        gateway.sees("b", "c")
        gateway.source.close()


def test_a_namespace_that_is_suddenly_empty_is_not_believed(
    api: ApiUnderTest, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.add("a")
    cluster.add("b")
    gateway = Watching(api, tmp_path)
    gateway.sees("a", "b")
    for name in ("a", "b"):
        cluster.label(name, app="other")
    gateway.is_told("it lists no node any more")
    cluster.label("a", app="prfaas")
    gateway.sees("a")
    gateway.source.close()


def test_a_refusal_names_verb_and_resource(api: ApiUnderTest, cluster: Cluster, tmp_path: Path) -> None:
    cluster.add("a")
    api.allow("gateway", frozenset({("watch", "pods")}))
    gateway = Watching(api, tmp_path)
    gateway.is_told("denied", "refuses to list pods in namespace llm (403)", "Role with the verbs list and watch")
    assert gateway.view.state == "unread"
    api.allow("gateway", frozenset({("list", "pods")}))
    gateway.is_told("refuses to watch pods in namespace llm (403)")
    api.allow("gateway", READ)
    gateway.sees("a")
    gateway.source.close()


def test_a_token_is_read_again_when_it_is_another(api: ApiUnderTest, cluster: Cluster, tmp_path: Path) -> None:
    cluster.add("a")
    (tmp_path / "token").write_text("expired")
    gateway = Watching(api, tmp_path)
    gateway.is_told("denied", "(401)")
    (tmp_path / "token").write_text("gateway\n")
    gateway.sees("a")
    (tmp_path / "token").unlink()
    gateway.look()
    gateway.sees("a")  # the watch goes on
    gateway.source.close()


def test_readiness_is_the_pods_condition(api: ApiUnderTest, cluster: Cluster, tmp_path: Path) -> None:
    gateway = Watching(api, tmp_path, readiness="pod")
    cluster.add("a")
    cluster.add("b")
    cluster.ready("a", True)
    gateway.sees("a")
    cluster.ready("b", True)
    gateway.sees("a", "b")
    cluster.ready("a", False)
    gateway.sees("b")
    cluster.ready("b", False)
    gateway.is_told("it lists no node any more")  # a cluster that is cut off calls every Pod unready
    gateway.source.close()


def test_readiness_is_that_of_endpoints(api: ApiUnderTest, cluster: Cluster, tmp_path: Path) -> None:
    gateway = Watching(api, tmp_path, readiness="endpoints", services=("decode", "prefill"))
    gateway.sees()
    for name, service in (("a", "decode"), ("b", "prefill"), ("c", "other")):
        cluster.add(name)
        cluster.serve(service, name, serving=True)
    gateway.sees("a", "b")
    cluster.serve("decode", "a", serving=False)  # its address is published all the same
    gateway.sees("b")
    cluster.serve("decode", "a", serving=True)
    gateway.sees("a", "b")
    cluster.serve("prefill", "b", serving=True, terminating=True)
    gateway.sees("a")
    gateway.source.close()


def test_many_pods_are_read_page_by_page(api: ApiUnderTest, cluster: Cluster, gateway: Watching) -> None:
    names = [f"n{number}" for number in range(300)]
    for number, name in enumerate(names):
        cluster.add(name, f"10.1.{number // 250}.{number % 250 + 1}")
    gateway.sees(*names)
