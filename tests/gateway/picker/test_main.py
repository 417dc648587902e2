"""Where a picker's servers come from: files in both formats, and Pods of a double of Kubernetes' API."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.picker.main import FollowedMembers, config_from
from gateway.picker.servers import ServerPool
from membership.kubernetes.objects import Metadata, Pod, PodSpec, PodStatus
from membership.kubernetes.pods import member_of
from membership.kubernetes.pool_source import InferencePoolSource
from membership.kubernetes.source import KubernetesSource
from membership.member import Member
from membership.sources import Source
from membership.watch import MembershipWatch
from prfaas.cli import parser
from tests.membership.kubernetes.servers import READ, Cluster, DoubledApi, config
from transport.control.settings import SettingsError


def pool_of(arguments: Sequence[str], wanted: int) -> dict[str, tuple[str, bool]]:
    """Addresses, and whether they only prefill, by id: once there are so many."""
    return followed(config_from(parser().parse_args(["epp", *arguments])).sources, wanted)


def followed(sources: Sequence[Source], wanted: int) -> dict[str, tuple[str, bool]]:
    pool = ServerPool(time.monotonic, tokens_per_s=1.0, max_running=1)

    async def follow() -> None:
        members = FollowedMembers(pool, sources)
        watch = MembershipWatch(members.sources, time.monotonic, members.saw, poll_s=0.02)
        async with asyncio.timeout(20):
            following = asyncio.create_task(watch.run())
            while len(pool) < wanted:  # noqa: ASYNC110 nothing tells
                await asyncio.sleep(0.02)
            following.cancel()
            await asyncio.wait([following])

    asyncio.run(follow())
    return {server.id: (server.address, server.prefills_only) for server in pool}


def test_servers_of_a_file_in_llm_ds_format(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.json"
    roles = {"a": "prefill", "b": "decode", "c": "encode-prefill", "d": "prefill-decode"}
    listed = [
        {
            "name": name,
            "namespace": "n",
            "address": "10.0.0.1",
            "port": str(8000 + index),
            "labels": {"llm-d.ai/role": role},
        }
        for index, (name, role) in enumerate(roles.items())
    ]
    file.write_text(json.dumps({"endpoints": listed}))
    assert pool_of(["--endpoints", str(file)], 4) == {
        "n/a": ("10.0.0.1:8000", True),
        "n/b": ("10.0.0.1:8001", False),
        "n/c": ("10.0.0.1:8002", True),
        "n/d": ("10.0.0.1:8003", False),
    }


def test_servers_of_a_file_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "servers.toml"
    file.write_text('[[nodes]]\nid = "a"\nagent = "10.0.0.1:8000"\nrole = "prefill"\n')
    assert pool_of(["--endpoints", str(file)], 1) == {"a": ("10.0.0.1:8000", True)}


def test_pods_that_are_ready_are_servers(tmp_path: Path) -> None:
    api = DoubledApi()
    api.start()
    try:
        api.allow("gateway", READ)
        cluster = Cluster(api)
        cluster.add("vllm-0")
        cluster.add("vllm-1")
        cluster.ready("vllm-1", True)
        source = KubernetesSource(config(api, tmp_path, readiness="pod"), server_ports=(8000,))
        assert followed([source], 1) == {"vllm-1": ("127.0.0.1:8000", False)}
    finally:
        api.close()


def test_a_pod_that_encodes_and_prefills_only_prefills(tmp_path: Path) -> None:
    pod = Pod(
        metadata=Metadata(name="e-0", namespace="llm", uid="1", labels={"llm-d.ai/role": "encode-prefill"}),
        spec=PodSpec(containers=[]),
        status=PodStatus(phase="Running", pod_ip="10.0.0.7"),
    )
    member = member_of(pod, server_port=8000)
    assert isinstance(member, Member)
    pool = ServerPool(time.monotonic, tokens_per_s=1.0, max_running=1)
    pool.follow({member.id: member})
    assert [server.prefills_only for server in pool] == [True]


def test_a_selector_that_is_none_is_said_before_anything_begins() -> None:
    with pytest.raises(SettingsError, match="selector"):
        config_from(parser().parse_args(["epp", "--selector", ""]))


def test_pods_are_asked_for_as_the_flags_say() -> None:
    asked = ["epp", "--selector", "app=vllm", "--pool-namespace", "llm", "--api-server", "http://127.0.0.1:8001"]
    (source,) = config_from(parser().parse_args(asked)).sources
    assert source.name == "kubernetes"


def test_without_a_file_or_a_selector_the_pool_is_asked_for(tmp_path: Path) -> None:
    asked = ["epp", "--pool-name", "vllm", "--pool-namespace", "llm", "--api-server", "http://127.0.0.1:8001"]
    config = config_from(parser().parse_args(asked))
    (source,) = config.sources
    assert isinstance(source, InferencePoolSource)
    assert config.pool_name == "vllm"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name the servers: --endpoints, --selector, or their InferencePool as --pool-name"),
        (["--pool-name", "vllm", "--target-port", "8000"], "--target-port 8000: the InferencePool vllm has its own"),
        (["--pool-name", "Vllm"], "name = 'Vllm'"),
    ],
)
def test_servers_that_are_not_named_are_said_before_anything_begins(arguments: Sequence[str], told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)):
        config_from(parser().parse_args(["epp", *arguments]))


def test_nodes_with_certificates_are_asked_by_files_that_go_together() -> None:
    arguments = ["epp", "--endpoints", "e.json", "--node-certificate", "a.pem"]
    with pytest.raises(SettingsError, match="--node-key is missing"):
        config_from(parser().parse_args(arguments))
    whole = config_from(parser().parse_args([*arguments, "--node-key", "a.key", "--node-authority", "authority.pem"]))
    assert whole.identity is not None
    assert (whole.identity.certificate, whole.identity.key) == (Path("a.pem"), Path("a.key"))
