from pathlib import Path

import pytest

from prfaas_cluster.__main__ import main

NODE = '[node]\nnode_id = "n"\ncluster = "c"\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NODE + 'cluster_kind = "pd"\nrole = "prefill"\n', "prfaas_cluster runs nodes of kind 'prfaas'"),
        (NODE + 'cluster_kind = "prfaas"\nrole = "decode"\n', "nodes of a PrfaaS cluster only prefill"),
    ],
)
def test_a_node_of_another_kind_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "node.toml").write_text(text)
    assert main(["-c", str(tmp_path / "node.toml")]) == 2
    assert message in capsys.readouterr().err


def test_help_shows_its_own_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "--cluster-kind {prfaas,pd} default: prfaas" in told
    assert "--role {prefill,decode} default: decode, in a PrfaaS cluster prefill" in told
