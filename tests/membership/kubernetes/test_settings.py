"""Settings of a registry in Kubernetes: what makes no sense is refused, and named."""

from pathlib import Path

import pytest

from membership.kubernetes.settings import ACCOUNT, KubernetesConfig
from transport.control.settings import SettingsError, build


def test_a_selector_is_enough() -> None:
    config = build(KubernetesConfig, {"selector": "app=prfaas"}, "[gateway.membership.kubernetes]")
    assert (config.base, config.is_tls, config.is_kubelets) == ("https://kubernetes.default.svc", True, True)
    assert config.authority == ACCOUNT / "ca.crt"


@pytest.mark.parametrize(
    "server", ["https://10.0.0.1:6443", "https://[::1]:6443/", "http://127.0.0.1:8001", "https://api"]
)
def test_servers_that_may_be_asked(server: str) -> None:
    assert KubernetesConfig(selector="a", server=server).base == server.rstrip("/")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"selector": ""}, "selector"),
        ({"selector": "a\n"}, "selector"),
        ({"namespaces": ("a", "a")}, "namespaces"),
        ({"namespaces": ("../x",)}, "namespaces"),
        ({"namespaces": tuple(f"n{number}" for number in range(17))}, "at most 16"),
        ({"readiness": "yes"}, "readiness"),
        ({"readiness": "endpoints"}, "services and readiness"),
        ({"services": ("decode",)}, "services and readiness"),
        ({"services": ("a,b",), "readiness": "endpoints"}, "services"),
        ({"agent_port": 70000}, "agent_port"),
        ({"server": "10.0.0.1:6443"}, "server"),
        ({"server": "https://10.0.0.1:x"}, "server"),
        ({"server": "https://"}, "server"),
        ({"server": "https://a/b"}, "server"),
        ({"server": "http://10.0.0.1:8001", "token_file": Path("token")}, "in clear"),
    ],
)
def test_what_makes_no_sense_is_named(more: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        KubernetesConfig(**{"selector": "app=prfaas", **more})  # type: ignore[arg-type]
