"""The script is run by a shell: it offers what the parser takes."""

import shutil
import subprocess

import pytest

from planner.commands.cli import main

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
OFFER = '\n_prfaas_plan; printf "%s\\n" "${COMPREPLY[@]}"\n'


def script(capsys, shell):
    with pytest.raises(SystemExit) as ended:
        main(["--completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


def offered(text, folder, *words):
    """What a tab offers for the last word."""
    line = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}"
    shown = subprocess.run(
        ["bash", "-c", f"{text}\n{line}{OFFER}"], capture_output=True, text=True, check=True, cwd=folder, timeout=30
    )
    return shown.stdout.split()


@needs_bash
def test_commands_options_words_and_files(capsys, tmp_path):
    text = script(capsys, "bash")
    (tmp_path / "site.toml").touch()
    assert offered(text, tmp_path, "prfaas-plan", "so") == ["solve"]
    assert offered(text, tmp_path, "prfaas-plan", "solve", "--obj") == ["--objective"]
    assert offered(text, tmp_path, "prfaas-plan", "solve", "--objective", "") == ["throughput", "cost", "slo"]
    assert offered(text, tmp_path, "prfaas-plan", "profile", "from") == ["from-config"]
    assert offered(text, tmp_path, "prfaas-plan", "solve", "-c", "si") == ["site.toml"]
    assert offered(text, tmp_path, "prfaas-plan", "emit", "plan.json", "--as", "v") == []
    assert "values" in offered(text, tmp_path, "prfaas-plan", "emit", "--as", "v")


def test_zsh_takes_the_script_of_bash(capsys):
    bash, zsh = script(capsys, "bash"), script(capsys, "zsh")
    assert zsh.splitlines()[0].startswith("autoload")
    assert bash.splitlines()[1:] == zsh.splitlines()[1:]
