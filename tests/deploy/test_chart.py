"""The Helm chart: our programs read the files that it writes, pods have no more rights than they need, and the kustomize base
is what it renders.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from gateway.config.gateway import GatewayConfig, load
from membership.documents import read_members
from membership.kubernetes.objects import Pod
from membership.kubernetes.pods import member_of
from membership.member import Member
from membership.view import RegistryReading, View
from node.command_line import config_from
from node.config import CLUSTER_KINDS, ENGINES, ROLES, NodeConfig
from planner.decisions.plans.offered import NodeReport
from planner.decisions.views import ClusterKind, Role
from planner.solve.control.wishes import LoadAims, ScaleWishes, site_wishes
from prfaas.cli import parser
from tests.membership.kubernetes.double import meets
from transport.peers.name import PeerName, PeerRole

ROOT: Final = Path(__file__).parent.parent.parent
CHART: Final = ROOT / "deploy/helm/prfaas"
BASE: Final = ROOT / "deploy/kustomize/base/site.yaml"
FETCHED: Final = ROOT / ".helm/helm/helm"
HELM: Final = os.environ.get("HELM") or shutil.which("helm") or (str(FETCHED) if FETCHED.exists() else "")
needs_helm = pytest.mark.skipif(not HELM, reason="no helm: HELM names it, scripts/fetch-helm fetches it")

TENANT: Final = "[gateway.tenants.first]\nkeys = ['" + "ab" * 32 + "']\n"
POD: Final = {"POD_NAME": "POD", "POD_IP": "10.2.3.4"}
POOL: Final = {"name": "p", "cluster": "east", "clusterKind": "prfaas", "role": "prefill", "engine": "vllm"}
EVERYTHING: Final = {
    "namesSecret": "prfaas-names",
    "model": {
        "path": "/models/llama",
        "servedModel": "llama",
        "volume": {"hostPath": {"path": "/srv/models", "type": "Directory"}},
    },
    "pools": [
        {
            **POOL,
            "replicas": 2,
            "cacheBytes": 68_719_476_736,
            "hostNetwork": True,
            "image": {"repository": "prfaas", "tag": "vllm"},
            "engineArgs": ["--max-num-seqs", "64"],
            "settings": 'ssd_dir = "/ssd"\nssd_bytes = 1099511627776\n',
            "volumes": [{"name": "ssd", "hostPath": {"path": "/ssd"}}],
            "volumeMounts": [{"name": "ssd", "mountPath": "/ssd"}],
            "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "80Gi"}},
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "topologySpreadConstraints": [],
            "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}],
            "annotations": {"why": "tests"},
        }
    ],
    "gateway": {
        "replicas": 3,
        "workers": 4,
        "nodes": [{"agent": "10.1.0.1:7001", "name": "home-d0", "id": "home-d0"}],
        "tlsSecret": "api",
        "settings": 'links = ["east:home"]\n',
        "tables": TENANT,
        "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
    },
    "networkPolicy": {"otherSites": ["10.1.0.0/16"], "apiFrom": [{"namespaceSelector": {}}], "monitoringFrom": [{}]},
    "podMonitors": {"enabled": True, "labels": {"release": "prometheus"}},
}  # fmt: skip

PLAIN: Final = {"certificates": {"mode": "none"}, "gateway": {"settings": "open = true"}}
DECODE: Final = {**POOL, "name": "d", "clusterKind": "pd", "role": "decode", "replicas": 1, "cacheBytes": 1 << 20}
SCALE: Final = {"min": 2, "max": 8, "load": 0.7}
KEDA: Final = {"keda": {"plan": "http://plan:8100"}}
BUSY: Final = NodeReport(
    node_id="d-0", agent="", cluster="east", kind=ClusterKind.PD, role=Role.DECODE, state="ready", running=9, slots=10
)
TOLD: Final = msgspec.to_builtins(  # by the plan service
    ScaleWishes(at=0.0, reason="", sites=site_wishes([BUSY], LoadAims()))
)

Manifest = dict[str, Any]


def rendered(tmp_path: Path, values: Mapping[str, Any]) -> list[Manifest]:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [HELM, "template", "site", str(CHART), "--namespace", "llm", "--values", str(file)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    return [each for each in yaml.safe_load_all(shown.stdout) if each]


def of_kind(manifests: Iterable[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] in kinds}


def pods_of(manifests: Iterable[Manifest]) -> dict[str, Manifest]:
    return {name: each["spec"]["template"] for name, each in of_kind(manifests, "Deployment", "StatefulSet").items()}


def container_of(pod: Manifest) -> Manifest:
    (container,) = pod["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def node_configs(manifests: list[Manifest], folder: Path) -> list[NodeConfig]:
    """The configuration of a pod of each pool: its file, with the flags of its command."""
    configs = []
    maps = of_kind(manifests, "ConfigMap")
    for name, workload in of_kind(manifests, "StatefulSet").items():
        file = folder / f"{name}.toml"
        file.write_text(maps[name]["data"]["node.toml"])
        arguments = [re.sub(r"\$\((\w+)\)", lambda found: POD[found[1]], str(argument)) for argument in
                     container_of(workload["spec"]["template"])["args"]]  # fmt: skip
        arguments[arguments.index("-c") + 1] = str(file)
        configs.append(config_from(parser().parse_args(arguments)))
    return configs


def gateway_config(manifests: list[Manifest], folder: Path) -> GatewayConfig:
    (name,) = of_kind(manifests, "Deployment")
    file = folder / "gateway.toml"
    file.write_text(of_kind(manifests, "ConfigMap")[name]["data"]["gateway.toml"])
    return load(file)


def members_of(manifests: list[Manifest]) -> tuple[Member, ...]:
    return tuple(reading_of(manifests).members)


def reading_of(manifests: list[Manifest]) -> RegistryReading:
    """The file of the gateway's other nodes."""
    (name,) = of_kind(manifests, "Deployment")
    return read_members(of_kind(manifests, "ConfigMap")[f"{name}-nodes"]["data"]["nodes.json"].encode(), is_toml=False)


@pytest.fixture(params=["base", pytest.param("everything", marks=needs_helm), pytest.param("plain", marks=needs_helm)])
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> list[Manifest]:
    if request.param == "base":
        return [each for each in yaml.safe_load_all(BASE.read_text()) if each]
    return rendered(
        tmp_path,
        EVERYTHING
        if request.param == "everything"
        else {"certificates": {"mode": "none"}, "gateway": {"settings": "open = true"}},
    )


def test_our_programs_read_its_files(manifests: list[Manifest], tmp_path: Path) -> None:
    for node in node_configs(manifests, tmp_path):
        assert (node.node_id, node.host) == ("POD", "10.2.3.4")
        assert node.plain == (node.certificate == "")
    gateway = gateway_config(manifests, tmp_path)
    assert gateway.membership.file == Path("/nodes/nodes.json")
    assert gateway.plain == (gateway.identity is None)


def test_every_pod_of_a_pool_is_a_member_by_the_name_in_its_certificate(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    nodes = dict(zip(of_kind(manifests, "StatefulSet"), node_configs(manifests, tmp_path), strict=True))
    selector = gateway_config(manifests, tmp_path).membership.kubernetes
    assert selector is not None
    for name, workload in of_kind(manifests, "StatefulSet").items():
        assert workload["spec"]["serviceName"] == name
        assert of_kind(manifests, "Service")[name]["spec"]["clusterIP"] == "None"
        made = pod_of(workload, selector.namespaces[0])
        assert meets(made, selector.selector)
        member = member_of(msgspec.convert(made, Pod))
        assert isinstance(member, Member)
        port = nodes[name].control_port
        assert (member.id, member.agent) == (f"{name}-0", f"10.2.3.4:{port}")
        assert (member.cluster, member.role) == (nodes[name].cluster, nodes[name].role)
        for volume in workload["spec"]["template"]["spec"]["volumes"]:
            if "csi" in volume:
                names = volume["csi"]["volumeAttributes"]["csi.cert-manager.io/dns-names"]
                assert member.name in names.replace("${POD_NAME}", f"{name}-0").split(",")
    for workload in of_kind(manifests, "Deployment").values():
        assert not meets(workload["spec"]["template"], selector.selector)


def pod_of(workload: Manifest, namespace: str) -> Manifest:
    """The first Pod, as the controller and the kubelet make it."""
    name, template = workload["metadata"]["name"], workload["spec"]["template"]
    return {
        "metadata": {**template["metadata"], "name": f"{name}-0", "namespace": namespace},
        "spec": {**template["spec"], "hostname": f"{name}-0", "subdomain": workload["spec"]["serviceName"]},
        "status": {"phase": "Running", "podIP": "10.2.3.4"},
    }


def test_a_gateway_may_list_and_watch_pods_and_nothing_else(manifests: list[Manifest], tmp_path: Path) -> None:
    kubernetes = gateway_config(manifests, tmp_path).membership.kubernetes
    assert kubernetes is not None
    assert not kubernetes.services
    ((name, deployment),) = of_kind(manifests, "Deployment").items()
    role, binding = (of_kind(manifests, kind)[name] for kind in ("Role", "RoleBinding"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", name)
    assert (subject["namespace"],) == kubernetes.namespaces
    spec = deployment["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == name
    (account,) = (volume["projected"] for volume in spec["volumes"] if volume["name"] == "account")
    (mount,) = (each["mountPath"] for each in spec["containers"][0]["volumeMounts"] if each["name"] == "account")
    files = {each["path"] for source in account["sources"] for each in (
        [source["serviceAccountToken"]] if "serviceAccountToken" in source else source["configMap"]["items"])}  # fmt: skip
    assert {str(kubernetes.token_file), str(kubernetes.authority)} == {f"{mount}/{path}" for path in files}
    for workload in of_kind(manifests, "StatefulSet").values():
        assert "serviceAccountName" not in workload["spec"]["template"]["spec"]
    assert not of_kind(manifests, "ClusterRole", "ClusterRoleBinding")


def test_certificates_name_the_pod_and_its_role(manifests: list[Manifest], tmp_path: Path) -> None:
    nodes = dict(zip(of_kind(manifests, "StatefulSet"), node_configs(manifests, tmp_path), strict=True))
    for name, pod in pods_of(manifests).items():
        asked = [volume["csi"]["volumeAttributes"] for volume in pod["spec"]["volumes"] if "csi" in volume]
        if not asked:
            continue
        named = PeerName.parse(asked[0]["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", "pod-0"))
        if name in nodes:
            wanted = PeerRole.PREFILL if nodes[name].cluster_kind == "prfaas" else PeerRole.NODE
            assert (named.cluster, named.role) == (nodes[name].cluster, wanted)
            assert any(f".{name}." in host for host in asked[0]["csi.cert-manager.io/dns-names"].split(","))
        else:
            assert named.role is PeerRole.GATEWAY


def test_pods_have_no_more_rights_than_they_need(manifests: list[Manifest]) -> None:
    for pod in pods_of(manifests).values():
        assert_few_rights(pod)


def assert_few_rights(pod: Manifest) -> None:
    """It may do what any process may, and the API server does not know it unless it says who it is."""
    spec, container = pod["spec"], container_of(pod)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_files_and_keys_are_mounted_where_they_are_named(manifests: list[Manifest], tmp_path: Path) -> None:
    gateway = gateway_config(manifests, tmp_path)
    named = {name: [node.metrics_key, node.certificate, node.names_secret] for name, node in
             zip(of_kind(manifests, "StatefulSet"), node_configs(manifests, tmp_path), strict=True)}  # fmt: skip
    (name,) = of_kind(manifests, "Deployment")
    named[name] = [
        str(path) for path in (gateway.tls_certificate, gateway.names_secret, gateway.membership.file) if path
    ]
    for name, pod in pods_of(manifests).items():
        mounts = {mount["mountPath"] for mount in container_of(pod)["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container_of(pod)["volumeMounts"]} == volumes
        for path in filter(None, named[name]):
            assert str(Path(path).parent) in mounts


def test_memory_and_time_are_enough(manifests: list[Manifest], tmp_path: Path) -> None:
    for name, node in zip(of_kind(manifests, "StatefulSet"), node_configs(manifests, tmp_path), strict=True):
        pod = pods_of(manifests)[name]
        (shm,) = (volume["emptyDir"] for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
        assert shm["medium"] == "Memory"
        assert int(shm["sizeLimit"]) > node.cache_bytes
        assert pod["spec"]["terminationGracePeriodSeconds"] > node.drain_timeout_s
        probe = container_of(pod)["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] > node.engine_start_timeout_s
        assert probe["httpGet"]["scheme"] == ("HTTPS" if node.certificate else "HTTP")
    (name,) = of_kind(manifests, "Deployment")
    drain_s = gateway_config(manifests, tmp_path).timeouts.drain_s
    assert pods_of(manifests)[name]["spec"]["terminationGracePeriodSeconds"] > drain_s


@needs_helm
def test_nodes_of_other_sites_are_listed_in_a_file(tmp_path: Path) -> None:
    assert members_of(rendered(tmp_path, EVERYTHING)) == (Member(id="home-d0", agent="10.1.0.1:7001", name="home-d0"),)


@needs_helm
def test_the_last_node_of_another_site_may_be_taken_out_of_the_file(tmp_path: Path) -> None:
    none_left = yaml.safe_load(yaml.safe_dump(EVERYTHING))
    none_left["gateway"]["nodes"] = []
    view = View().read(reading_of(rendered(tmp_path, EVERYTHING)), 0.0)
    view = view.read(reading_of(rendered(tmp_path, none_left)), 0.0)
    assert (view.state, view.members) == ("fresh", {})


@needs_helm
def test_an_account_of_ones_own_takes_the_place_of_the_charts(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, {"gateway": {"tables": TENANT, "serviceAccount": "ours"}})
    (gateway,) = of_kind(manifests, "Deployment").values()
    assert gateway["spec"]["template"]["spec"]["serviceAccountName"] == "ours"
    assert not of_kind(manifests, "ServiceAccount", "Role", "RoleBinding")


@needs_helm
def test_only_what_a_gateway_reads_once_restarts_it(tmp_path: Path) -> None:
    def gateway_pod(change: Mapping[str, Any]) -> Manifest:
        return pods_of(rendered(tmp_path, {**EVERYTHING, "gateway": {**EVERYTHING["gateway"], **change}}))[
            "site-gateway"
        ]

    before = gateway_pod({})
    assert gateway_pod({"nodes": [], "replicas": 5}) == before
    assert gateway_pod({"thresholdTokens": 5}) != before


@needs_helm
def test_a_pool_that_grows_restarts_no_node(tmp_path: Path) -> None:
    def node_pod(change: Mapping[str, Any]) -> Manifest:
        values = {**PLAIN, "keda": {"plan": "http://plan:8100"}, "pools": [{**DECODE, **change}]}
        return pods_of(rendered(tmp_path, values))["site-d"]

    before = node_pod({})
    assert node_pod({"replicas": 5}) == before
    assert node_pod({"scale": SCALE}) == before
    assert node_pod({"engineArgs": ["--max-num-seqs", "64"]}) != before


@needs_helm
def test_keda_scales_a_pool_by_what_the_plan_service_tells(tmp_path: Path) -> None:
    values = {
        **PLAIN,
        "keda": {"plan": "https://plan.llm.svc:8100/", "authMode": "tls", "authentication": "plan", "cooldownS": 7200},
        "pools": [{**DECODE, "scale": SCALE}, {**DECODE, "name": "fixed"}],
    }
    manifests = rendered(tmp_path, values)
    ((name, scaled),) = of_kind(manifests, "ScaledObject").items()
    pools = of_kind(manifests, "StatefulSet")
    assert scaled["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
    assert "replicas" not in pools[name]["spec"]
    assert pools["site-fixed"]["spec"]["replicas"] == DECODE["replicas"]
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 8)
    (trigger,) = scaled["spec"]["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("metrics-api", "Value")
    assert trigger["authenticationRef"] == {"name": "plan"}
    asked = trigger["metadata"]
    assert (asked["url"], asked["targetValue"]) == ("https://plan.llm.svc:8100/scale", "0.7")
    told: object = TOLD
    for key in asked["valueLocation"].split("."):
        assert isinstance(told, dict)
        told = told[key]
    assert told == 0.9
    down = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] <= 3600  # as Kubernetes allows
    assert down["policies"][0]["periodSeconds"] <= 1800


@needs_helm
def test_keda_scales_a_pool_that_prefills_for_others_and_names_with_dots(tmp_path: Path) -> None:
    pool = {**POOL, "cluster": "east.1", "replicas": 1, "cacheBytes": 1 << 20, "scale": SCALE}
    (scaled,) = of_kind(rendered(tmp_path, {**PLAIN, **KEDA, "pools": [pool]}), "ScaledObject").values()
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["valueLocation"] == "sites.east\\.1.prefill.load"


def test_keda_scales_nothing_unless_asked(manifests: list[Manifest]) -> None:
    assert not of_kind(manifests, "ScaledObject")


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pools": [{**DECODE, "scale": SCALE}]}, "keda.plan"),
        ({"pools": [{**DECODE, "scale": {"min": 2, "max": 8}}]}, "load"),
        ({**KEDA, "pools": [{**DECODE, "scale": {**SCALE, "min": 9}}]}, "more than scale.max"),
        ({"pools": [{**POOL, "replicas": 1, "cacheBytes": 1, "role": "decode"}]}, "only prefill"),
        ({"pools": [{**POOL, "replicas": 1}]}, "cacheBytes"),
        ({"pools": [{**POOL, "replicas": 1, "cacheBytes": "1Gi"}]}, "cacheBytes"),
        ({"pools": [{**POOL, "replicas": 1, "cacheBytes": 1, "maxReplicas": 4}]}, "maxReplicas"),
        ({"certificates": {"mode": "off"}}, "mode"),
        ({"gatway": {}}, "gatway"),
        ({}, "name a tenant"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, values: Mapping[str, Any], said: str) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    shown = subprocess.run(
        [HELM, "template", "site", str(CHART), "-f", str(file)], capture_output=True, text=True, check=False
    )
    assert shown.returncode != 0
    assert said in shown.stderr


@needs_helm
def test_helm_finds_nothing_wrong() -> None:
    linted = subprocess.run([HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


@needs_helm
def test_the_kustomize_base_is_what_the_chart_renders() -> None:
    shown = subprocess.run(
        [ROOT / "scripts/kustomize-base", "-"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HELM": HELM},
    )
    assert BASE.read_text() == shown.stdout, "run scripts/kustomize-base"


def test_it_takes_every_engine_and_role() -> None:
    pool = json.loads((CHART / "values.schema.json").read_text())["definitions"]["pool"]["properties"]
    taken = [set(pool[key]["enum"]) for key in ("engine", "role", "clusterKind")]
    assert taken == [set(ENGINES), set(ROLES), set(CLUSTER_KINDS)]


def test_its_version_is_ours() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^__version__ = "(.+)"', (ROOT / "prfaas/__init__.py").read_text(), re.MULTILINE)
    assert (chart["version"], chart["appVersion"]) == (version, version)
