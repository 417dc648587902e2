"""`prfaas nodes` and `prfaas check` of a gateway whose nodes are Pods: what is wrong is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.cli import main
from tests.membership.kubernetes.servers import NAMESPACE, READ, SELECTOR, Cluster, DoubledApi
from tests.prfaas.system.test_membership_in_kubernetes import in_kubernetes


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator["Gateway"]:
    api = DoubledApi()
    api.start()
    api.allow("gateway", READ)
    Cluster(api).add("d-0")
    (tmp_path / "token").write_text("gateway\n")
    (tmp_path / "token").chmod(0o600)
    yield Gateway(api, tmp_path / "gateway.toml")
    api.close()


class Gateway:
    """Its file, and what the commands say of it."""

    def __init__(self, api: DoubledApi, file: Path) -> None:
        self.api = api
        self._file = file
        self._text = in_kubernetes(api)

    def says(self, capsys: pytest.CaptureFixture[str], *command: str, old: str = "", new: str = "") -> tuple[int, str]:
        assert old in self._text
        self._file.write_text(self._text.replace(old, new) if old else self._text + new)
        code = main([*command, "-c", str(self._file)])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())


def test_pods_are_listed(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = gateway.says(capsys, "nodes", "list")
    assert (code, "d-0 127.0.0.1:7001" in said) == (0, True)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (SELECTOR, "app=prfas", "selector 'app=prfas' in namespaces llm, readiness by agent"),
        (f'["{NAMESPACE}"]', '["llmm"]', f"selector '{SELECTOR}' in namespaces llmm"),
        (
            "",
            'readiness = "endpoints"\nservices = ["decod"]\n',
            f"selector {SELECTOR!r} in namespaces llm, readiness by endpoints of services decod",
        ),
    ],
)
def test_a_choice_that_finds_no_pod_is_named(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], old: str, new: str, named: str
) -> None:
    _, said = gateway.says(capsys, "check", old=old, new=new)
    assert f"kubernetes: no Pod is a node: {named}" in said
    assert "1 warnings" in said


def test_an_account_without_rights_is_told_what_it_needs(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.api.allow("gateway", frozenset())
    code, said = gateway.says(capsys, "nodes", "list")
    assert code == 1
    assert "refuses to list pods in namespace llm (403)" in said
    assert "a Role with the verbs list and watch" in said


def test_a_pod_without_an_account_is_named_by_the_file(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = gateway.says(capsys, "nodes", "list", old='token_file = "token"', new='token_file = "none"')
    assert code == 1
    assert "none: [Errno 2] No such file or directory" in said
