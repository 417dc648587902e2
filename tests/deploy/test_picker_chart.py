"""The chart's picker: it is asked for a pool that it may read, at ports that its probes and its policy know."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gateway.picker.certificates import TlsFiles
from gateway.picker.main import PickerConfig, config_from
from membership.kubernetes.pool_source import GROUP, InferencePoolSource
from prfaas.cli import parser
from tests.deploy.test_chart import (
    BASE,
    PLAIN,
    Manifest,
    assert_few_rights,
    container_of,
    needs_helm,
    of_kind,
    pods_of,
    rendered,
)

NAME: Final = "site-picker"
PICKER: Final = {"enabled": True, "pool": "vllm"}
SEALED: Final = {**PICKER, "tlsSecret": "picker-tls", "clientAuthority": "proxies", "args": ["--fallbacks", "2"]}


def manifests_of(folder: Path, picker: Mapping[str, Any], **more: Any) -> list[Manifest]:
    return rendered(folder, {**PLAIN, "picker": picker, **more})


def config_of(manifests: list[Manifest]) -> PickerConfig:
    return config_from(parser().parse_args(container_of(pods_of(manifests)[NAME])["args"]))


def test_without_being_asked_for_there_is_none() -> None:
    assert not [each for each in yaml.safe_load_all(BASE.read_text()) if each and "picker" in each["metadata"]["name"]]


@needs_helm
@pytest.mark.parametrize("picker", [PICKER, SEALED])
def test_our_program_reads_its_flags(tmp_path: Path, picker: Mapping[str, Any]) -> None:
    manifests = manifests_of(tmp_path, picker)
    config = config_of(manifests)
    (source,) = config.sources
    assert isinstance(source, InferencePoolSource)
    assert config.pool_name == "vllm"
    pod = pods_of(manifests)[NAME]
    ports = {each["name"]: each["containerPort"] for each in container_of(pod)["ports"]}
    assert ports == {"grpc": config.grpc_port, "health": config.health_port, "metrics": config.metrics_port}
    assert container_of(pod)["readinessProbe"]["grpc"]["port"] == config.health_port
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.drain_s
    (served,) = of_kind(manifests, "Service")[NAME]["spec"]["ports"]
    assert (served["port"], served["targetPort"]) == (config.grpc_port, "grpc")
    open_ports = {
        port["port"] for rule in of_kind(manifests, "NetworkPolicy")[NAME]["spec"]["ingress"] for port in rule["ports"]
    }
    assert open_ports == set(ports.values())


@needs_helm
def test_its_files_are_mounted_where_its_flags_name_them(tmp_path: Path) -> None:
    manifests = manifests_of(tmp_path, SEALED)
    config, spec = config_of(manifests), pods_of(manifests)[NAME]["spec"]
    assert config.tls == TlsFiles(Path("/tls"), Path("/proxies/ca.crt"))
    assert config.settings.fallbacks == 2
    mounts = {each["name"]: each["mountPath"] for each in container_of(pods_of(manifests)[NAME])["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert set(mounts) == set(volumes)
    assert (mounts["tls"], volumes["tls"]["secret"]["secretName"]) == ("/tls", "picker-tls")
    assert (mounts["proxies"], volumes["proxies"]["configMap"]["name"]) == ("/proxies", "proxies")


@needs_helm
def test_it_may_list_and_watch_pods_and_its_pool_and_nothing_else(tmp_path: Path) -> None:
    manifests = manifests_of(tmp_path, PICKER)
    assert_few_rights(pods_of(manifests)[NAME])
    role, binding = (of_kind(manifests, kind)[NAME] for kind in ("Role", "RoleBinding"))
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {
            "apiGroups": [GROUP.partition("/")[0]],
            "resources": ["inferencepools"],
            "resourceNames": ["vllm"],
            "verbs": ["list", "watch"],
        },
    ]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": NAME, "namespace": "llm"}]
    assert pods_of(manifests)[NAME]["spec"]["serviceAccountName"] == NAME


@needs_helm
def test_an_account_of_ones_own_takes_the_place_of_the_charts(tmp_path: Path) -> None:
    manifests = manifests_of(tmp_path, {**PICKER, "serviceAccount": "ours"})
    assert pods_of(manifests)[NAME]["spec"]["serviceAccountName"] == "ours"
    assert NAME not in of_kind(manifests, "ServiceAccount", "Role", "RoleBinding")


@needs_helm
@pytest.mark.parametrize(
    ("picker", "told"),
    [
        ({"enabled": True}, "picker.pool: name the InferencePool"),
        ({**PICKER, "clientAuthority": "proxies"}, "picker.clientAuthority needs picker.tlsSecret"),
        ({**PICKER, "ports": {}}, "additional properties"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, picker: Mapping[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match="(?i)" + told.replace(".", r"\.")):
        manifests_of(tmp_path, picker)
