"""The servers of an InferencePool follow the object, and the Pods that it chooses."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from membership.errors import KubernetesFailed
from membership.kubernetes.pool_source import InferencePoolSource
from membership.kubernetes.settings import InferencePoolConfig
from membership.view import RegistryReading
from tests.membership.etcd.servers import until
from tests.membership.kubernetes.servers import NAMESPACE, READ, READ_POOLS, Cluster, DoubledApi

Follow = Callable[..., InferencePoolSource]
SERVERS = "servers"


@pytest.fixture
def api() -> Iterator[DoubledApi]:
    server = DoubledApi()
    server.start()
    server.allow("gateway", READ_POOLS)
    yield server
    server.close()


@pytest.fixture
def follow(api: DoubledApi, tmp_path: Path) -> Iterator[Follow]:
    (tmp_path / "token").write_text("gateway\n")
    made: list[InferencePoolSource] = []

    def source(namespace: str = NAMESPACE, server: str = "", begin_s: float = 9.0) -> InferencePoolSource:
        config = InferencePoolConfig(
            name=SERVERS, namespace=namespace, server=server or api.base, token_file=tmp_path / "token"
        )
        made.append(InferencePoolSource(config, rng=np.random.default_rng(1), begin_s=begin_s))
        return made[-1]

    yield source
    for each in made:
        each.close()


class Followed:
    """What a source has said last. `reason` is that of the last look, "" where it went well."""

    def __init__(self, source: InferencePoolSource) -> None:
        self._source = source
        self._said = RegistryReading()
        self.reason = self.text = ""

    def servers(self) -> dict[str, str]:
        """Addresses by id."""
        try:
            self._said = self._source.look() or self._said
            self.reason = self.text = ""
        except KubernetesFailed as failure:
            self.reason, self.text = failure.reason, str(failure)
        return {member.id: member.agent for member in self._said.members}


def cluster_of(api: DoubledApi, *ready: str) -> Cluster:
    """Pods of two applications; the named ones are ready."""
    cluster = Cluster(api)
    for name, application in (("v-0", "vllm"), ("v-1", "vllm"), ("w-0", "other")):
        cluster.add(name, f"10.0.0.{len(name) + ord(name[-1]) + ord(name[0])}", labels={"app": application})
        cluster.ready(name, name in ready)
    return cluster


def test_pods_of_the_pool_that_are_ready_are_servers_at_its_port(api: DoubledApi, follow: Follow) -> None:
    cluster_of(api, "v-0", "w-0").pool(SERVERS, 8000, app="vllm")
    found = Followed(follow())
    assert {name: at.partition(":")[2] for name, at in found.servers().items()} == {"v-0": "8000"}
    assert found.reason == ""


def test_a_pod_has_a_server_at_each_of_several_ports(api: DoubledApi, follow: Follow) -> None:
    cluster_of(api, "v-0").pool(SERVERS, 8000, 8001, app="vllm")
    found = {name: at.partition(":")[2] for name, at in Followed(follow()).servers().items()}
    assert found == {"v-0-rank-0": "8000", "v-0-rank-1": "8001"}


def test_another_selector_or_port_counts_at_once(api: DoubledApi, follow: Follow) -> None:
    cluster = cluster_of(api, "v-0", "w-0")
    cluster.pool(SERVERS, 8000, app="vllm")
    found = Followed(follow())
    assert set(found.servers()) == {"v-0"}
    before = threading.active_count()
    cluster.retarget(SERVERS, 9000)
    until(lambda: [at.partition(":")[2] for at in found.servers().values()] == ["9000"])
    cluster.pool(SERVERS, 9000, app="other")
    until(lambda: set(found.servers()) == {"w-0"})
    until(lambda: threading.active_count() <= before)  # those that followed other Pods have ended


def test_other_pools_do_not_count(api: DoubledApi, follow: Follow) -> None:
    cluster = cluster_of(api, "v-0", "w-0")
    cluster.pool(SERVERS, 8000, app="vllm")
    found = Followed(follow())
    found.servers()
    cluster.pool("elsewhere", 9000, app="other")
    cluster.ready("v-1", True)  # which is told later
    until(lambda: set(found.servers()) == {"v-0", "v-1"})


def test_a_pool_that_is_not_there_is_named_and_counts_once_it_is(api: DoubledApi, follow: Follow) -> None:
    cluster, found = cluster_of(api, "v-0"), Followed(follow())
    assert found.servers() == {}
    assert (found.reason, found.text) == ("missing", "there is no InferencePool llm/servers")
    cluster.pool(SERVERS, 8000, app="vllm")
    until(lambda: set(found.servers()) == {"v-0"})


def test_a_pool_that_is_deleted_leaves_its_servers_and_says_so(api: DoubledApi, follow: Follow) -> None:
    cluster = cluster_of(api, "v-0")
    cluster.pool(SERVERS, 8000, app="vllm")
    found = Followed(follow())
    assert set(found.servers()) == {"v-0"}
    cluster.drop_pool(SERVERS)
    until(lambda: bool(found.servers()) and found.reason == "missing")


def test_an_account_without_the_right_to_pools_is_told_which_one_it_needs(api: DoubledApi, follow: Follow) -> None:
    api.allow("gateway", READ)
    cluster_of(api, "v-0").pool(SERVERS, 8000, app="vllm")
    found = Followed(follow())
    found.servers()
    assert found.reason == "denied"
    assert "inferencepools in namespace llm" in found.text
    assert "its account needs a Role with the verbs list and watch" in found.text


def test_without_a_name_the_namespace_is_our_own(api: DoubledApi, follow: Follow, tmp_path: Path) -> None:
    cluster_of(api, "v-0").pool(SERVERS, 8000, app="vllm")
    (tmp_path / "namespace").write_text(f"{NAMESPACE}\n")
    assert set(Followed(follow(namespace="")).servers()) == {"v-0"}


def test_a_source_that_is_closed_ends_its_threads(api: DoubledApi, follow: Follow) -> None:
    before = threading.active_count()
    cluster_of(api, "v-0").pool(SERVERS, 8000, app="vllm")
    source = follow()
    found = Followed(source)
    found.servers()
    source.close()
    until(lambda: threading.active_count() <= before)
    found.servers()
    assert (found.reason, "no longer asked" in found.text) == ("unreachable", True)


def test_closing_wakes_a_look_that_waits(follow: Follow) -> None:
    source = follow(server="http://127.0.0.1:1", begin_s=60.0)
    found = Followed(source)
    waiting = threading.Thread(target=found.servers)
    waiting.start()
    time.sleep(0.05)
    source.close()
    waiting.join(60.0)
    assert found.reason == "unreachable"
