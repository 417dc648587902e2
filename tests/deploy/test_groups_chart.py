"""Pools of the chart that are groups: LeaderWorkerSets, and roles of DisaggregatedSets. Their pods are nodes, with names that
gateways and certificates agree on.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from engine.vllm.server.servable import complaint_about_parallelism
from membership.kubernetes.objects import Pod
from membership.kubernetes.pods import member_of
from membership.member import Member
from node.command_line import config_from, split_engine_args
from node.config import NodeConfig
from prfaas.cli import parser
from tests.deploy.crds import Schemas, faults, schemas_of
from tests.deploy.test_chart import (
    CHART,
    DECODE,
    EVERYTHING,
    HELM,
    KEDA,
    PLAIN,
    POD,
    SCALE,
    TENANT,
    Manifest,
    assert_few_rights,
    container_of,
    needs_helm,
    of_kind,
    pods_of,
    rendered,
)
from transport.peers.name import PeerName

CRDS: Final = "LWS_CRDS"  # names a folder with the CRDs of kubernetes-sigs/lws: its config/crd/bases

PREFILL: Final = {**DECODE, "name": "prefill", "role": "prefill", "replicas": 1}
RANKS: Final = {**DECODE, "name": "ranks", "replicas": 2, "groupSize": 4}
ROLES: Final = [{**PREFILL, "set": "home"}, {**RANKS, "set": "home"}]
GATEWAY: Final = {"gateway": {"tables": TENANT}}  # with certificates
LWS_ENV: Final = {"LWS_LEADER_ADDRESS": "site-ranks-1.site-ranks.llm", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}

pytestmark = needs_helm


def groups_of(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The leaderWorkerTemplate of each pool that is groups."""
    found = {each["metadata"]["labels"]["prfaas/pool"]: each for each in of_kind(manifests, "LeaderWorkerSet").values()}
    for whole in of_kind(manifests, "DisaggregatedSet").values():
        found |= {role["name"]: role for role in whole["spec"]["roles"]}
    return {name: each["spec"]["leaderWorkerTemplate"] for name, each in found.items()}


def pod_of(template: Manifest, name: str, subdomain: str) -> Manifest:
    """A Pod as the controllers of LeaderWorkerSets make it: its subdomain is the LeaderWorkerSet's name."""
    return {
        "metadata": {**template["metadata"], "name": name, "namespace": "llm"},
        "spec": {**template["spec"], "hostname": name, "subdomain": subdomain},
        "status": {"phase": "Running", "podIP": "10.2.3.4"},
    }


def config_of(manifests: list[Manifest], pool: str, folder: Path) -> NodeConfig:
    """What a pod's node reads: its file, and its command with the variables that the controllers add."""
    template = groups_of(manifests)[pool]["workerTemplate"]
    file = folder / "node.toml"
    file.write_text(of_kind(manifests, "ConfigMap")[f"site-{pool}"]["data"]["node.toml"])
    known = POD | LWS_ENV
    given = [
        re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], str(each)) for each in container_of(template)["args"]
    ]
    given[given.index("-c") + 1] = str(file)
    ours, engines = split_engine_args(given)
    return config_from(parser().parse_args(ours), engines)


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    if CRDS not in os.environ:
        pytest.skip(f"{CRDS} names no folder of CRDs")
    return schemas_of(Path(os.environ[CRDS]))


def test_a_pool_of_groups_is_a_leader_worker_set_and_nothing_else(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, {**PLAIN, "pools": [RANKS]})
    ((name, workload),) = of_kind(manifests, "LeaderWorkerSet").items()
    assert (name, workload["apiVersion"], workload["spec"]["replicas"]) == (
        "site-ranks", "leaderworkerset.x-k8s.io/v1", 2,
    )  # fmt: skip
    (group,) = groups_of(manifests).values()
    assert (group["size"], group["restartPolicy"]) == (4, "RecreateGroupOnPodRestart")
    assert name not in of_kind(manifests, "StatefulSet", "Service")  # the controller makes the service
    assert_few_rights(group["workerTemplate"])


def test_each_pod_of_a_group_is_a_node_with_one_rank(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, {**PLAIN, "pools": [{**RANKS, "engineArgs": ["--enable-expert-parallel"]}]})
    node = config_of(manifests, "ranks", tmp_path)
    assert (node.node_id, node.host) == ("POD", "10.2.3.4")
    assert node.engine_args == (
        "--enable-expert-parallel", "--data-parallel-size", "4", "--data-parallel-rank", "3",
        "--data-parallel-address", "site-ranks-1.site-ranks.llm",
    )  # fmt: skip
    assert complaint_about_parallelism(node.engine_args) is None
    assert node.engine_max_restarts == 0, "an engine alone cannot join the others again: its container ends"


def test_a_group_of_one_pod_has_no_ranks(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, {**PLAIN, "pools": [{**RANKS, "groupSize": 1, "engine": "sglang"}]})
    node = config_of(manifests, "ranks", tmp_path)
    assert (node.engine_args, node.engine_max_restarts) == ((), 5)
    assert groups_of(manifests)["ranks"]["restartPolicy"] == "None"  # its container may start anew by itself
    assert not [name for name in of_kind(manifests, "NetworkPolicy") if name.endswith("-ranks-ranks")]


@pytest.mark.parametrize(
    ("pools", "name", "subdomain"),
    [
        ([RANKS], "site-ranks-1-3", "site-ranks"),
        (ROLES, "site-home-0-ab12cd34-ranks-1-3", "site-home-0-ab12cd34-ranks"),
    ],
)
def test_a_pod_is_a_member_by_the_name_in_its_certificate(
    tmp_path: Path, pools: list[Mapping[str, Any]], name: str, subdomain: str
) -> None:
    template = groups_of(rendered(tmp_path, {**GATEWAY, "pools": pools}))["ranks"]["workerTemplate"]
    member = member_of(msgspec.convert(pod_of(template, name, subdomain), Pod))
    assert isinstance(member, Member)
    assert (member.id, member.cluster, member.role) == (name, "east", "decode")
    (asked,) = (each["csi"]["volumeAttributes"] for each in template["spec"]["volumes"] if "csi" in each)
    carried = asked["csi.cert-manager.io/dns-names"].replace("${POD_NAME}", name).split(",")
    assert member.name in carried
    assert PeerName.parse(asked["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", name)).cluster == "east"


def test_ranks_reach_each_other_at_every_port_and_others_do_not(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, {**PLAIN, "pools": [RANKS]})
    spec = of_kind(manifests, "NetworkPolicy")["site-ranks-ranks"]["spec"]
    labels = groups_of(manifests)["ranks"]["workerTemplate"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["podSelector"]["matchLabels"]["prfaas/pool"] == "ranks"
    assert spec["ingress"] == [{"from": [{"podSelector": spec["podSelector"]}]}]


def test_pools_of_one_set_are_its_roles(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, {**PLAIN, "pools": [*ROLES, DECODE]})
    ((name, whole),) = of_kind(manifests, "DisaggregatedSet").items()
    assert (name, whole["apiVersion"]) == ("site-home", "disaggregatedset.x-k8s.io/v1")
    roles = {role["name"]: role for role in whole["spec"]["roles"]}
    assert {name: role["spec"]["replicas"] for name, role in roles.items()} == {"prefill": 1, "ranks": 2}
    assert not [role for role in roles.values() if "scaling" in role]
    assert {name: group["size"] for name, group in groups_of(manifests).items()} == {"prefill": 1, "ranks": 4}
    assert list(of_kind(manifests, "StatefulSet")) == ["site-d"]
    assert not of_kind(manifests, "LeaderWorkerSet")


@pytest.mark.parametrize(
    ("pools", "target"),
    [
        ([{**RANKS, "scale": SCALE}], ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "site-ranks")),
        (
            [ROLES[0], {**ROLES[1], "scale": SCALE}],
            ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSetRoleScaler", "site-home-ranks"),
        ),
    ],
)
def test_others_scale_what_has_scale(
    tmp_path: Path, pools: list[Mapping[str, Any]], target: tuple[str, str, str]
) -> None:
    manifests = rendered(tmp_path, {**PLAIN, **KEDA, "pools": pools})
    (scaled,) = of_kind(manifests, "ScaledObject").values()
    assert tuple(scaled["spec"]["scaleTargetRef"][key] for key in ("apiVersion", "kind", "name")) == target
    for workload in of_kind(manifests, "LeaderWorkerSet").values():
        assert "replicas" not in workload["spec"]
    for whole in of_kind(manifests, "DisaggregatedSet").values():
        prefill, ranks = whole["spec"]["roles"]
        assert ("scaling" in prefill, ranks["scaling"]) == (False, {"mode": "External"})
        assert "replicas" not in ranks["spec"]


def test_other_counts_roll_nothing(tmp_path: Path) -> None:
    def group(change: Mapping[str, Any]) -> Manifest:
        return groups_of(rendered(tmp_path, {**PLAIN, **KEDA, "pools": [ROLES[0], {**ROLES[1], **change}]}))["ranks"]

    before = group({})
    assert group({"replicas": 5}) == before == group({"scale": SCALE})
    assert group({"engineArgs": ["--max-num-seqs", "64"]}) != before


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pools": [{**RANKS, "engine": "sglang"}]}, "other engines have one"),
        ({"pools": [{**RANKS, "groupSize": -1}]}, "groupSize"),
        ({"pools": [{**DECODE, "engine": "vllm", "engineArgs": ["--data-parallel-size", "4"]}]}, "a Pod is one node"),
        ({"pools": [{**DECODE, "engine": "vllm", "engineArgs": ["-dp=4"]}]}, "groupSize says how many"),
        ({"pools": [{**RANKS, "set": "Home"}]}, "set"),
        ({"pools": ROLES[:1]}, "2 to 10 pools, and this has 1"),
        ({"pools": [ROLES[0], {**ROLES[1], "replicas": 0}]}, "or none has"),
        ({"pools": [{**each, "set": "s" * 32} for each in [PREFILL, {**RANKS, "name": "d" * 12}]]}, "47 characters"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        rendered(tmp_path, {**PLAIN, **values})


def test_nothing_of_this_is_there_unless_asked_for(tmp_path: Path) -> None:
    assert not groups_of(rendered(tmp_path, EVERYTHING))
    assert list(pods_of(rendered(tmp_path, {**PLAIN, "pools": [DECODE]}))) == ["site-gateway", "site-d"]


@pytest.mark.parametrize("pools", [[RANKS], ROLES, [ROLES[0], {**ROLES[1], "scale": SCALE}]])
@pytest.mark.parametrize("values", [PLAIN, {**EVERYTHING, "certificates": {"mode": "csi"}}])
def test_they_are_what_the_schemas_say(
    tmp_path: Path, schemas: Schemas, values: Mapping[str, Any], pools: list[Mapping[str, Any]]
) -> None:
    rich = [{**EVERYTHING["pools"][0], **each} for each in pools] if values is not PLAIN else pools
    manifests = rendered(tmp_path, {**values, **KEDA, "pools": rich})
    checked = of_kind(manifests, "LeaderWorkerSet", "DisaggregatedSet").values()
    assert checked
    for each in checked:
        assert list(faults(schemas[each["apiVersion"], each["kind"]], each)) == []


def test_the_schemas_find_what_is_wrong(tmp_path: Path, schemas: Schemas) -> None:
    ((key, schema),) = ((key, each) for key, each in schemas.items() if key[1] == "LeaderWorkerSet")
    (workload,) = of_kind(rendered(tmp_path, {**PLAIN, "pools": [RANKS]}), key[1]).values()
    workload["spec"]["leaderWorkerTemplate"] |= {"groups": 4, "restartPolicy": "Always"}
    workload["spec"]["replicas"] = "2"
    found = "\n".join(faults(schema, workload))
    assert "groups: unknown" in found
    assert "restartPolicy: 'Always' is not one of" in found
    assert "replicas: '2' is no integer" in found


def test_helm_lints_pools_of_groups(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, **KEDA, "pools": [*ROLES, {**RANKS, "name": "more", "scale": SCALE}]}))
    linted = subprocess.run(
        [HELM, "lint", "--strict", str(CHART), "-f", str(file)], capture_output=True, text=True, check=False
    )
    assert linted.returncode == 0, linted.stdout
