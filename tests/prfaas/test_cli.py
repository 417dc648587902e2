import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.cli import main


@pytest.mark.parametrize("command", [["demo"], ["up"], ["gateway"], ["node"], ["model"], ["model", "build"], []])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: prfaas" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "up", "gateway", "node"])
def test_a_missing_file_is_named_without_a_traceback(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "-c", "missing.toml"]) == 2
    assert "missing.toml" in capsys.readouterr().err


def test_an_unknown_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[node]\nnode_idd = 'x'\n")
    assert main(["node", "-c", str(path)]) == 2
    assert "unknown key 'node_idd'" in capsys.readouterr().err


def test_an_unknown_architecture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "build", "--arch", "gpt5", "--out", str(tmp_path / "m")]) == 2
    assert "arch = 'gpt5': allowed are kimi_linear, " in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "topology.toml"
    cluster = '[[clusters]]\nname = "c"\nkind = "pd"\nnodes = [{ node_id = "d", role = "decode" }]\n'
    path.write_text(f'[model]\npath = "{tmp_path}/none"\n{cluster}')
    assert main(["up", "-c", str(path), "--state-dir", str(tmp_path)]) == 2
    assert "none': it must be a model directory" in capsys.readouterr().err


def test_the_command_line_does_not_import_torch() -> None:
    code = "import sys, prfaas.cli; prfaas.cli._parser(); sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
