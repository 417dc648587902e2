"""The job for Slurm: its scripts parse, the file that a task writes is a node's, and a drain ends the agent alone."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from node.agent import ENGINE_STOP_S
from node.command_line import config_from
from node.config import NodeConfig
from prfaas.cli import parser

FOLDER: Final = Path(__file__).parent.parent.parent / "deploy" / "slurm"
JOB: Final = FOLDER / "prfaas-nodes.sbatch"
TASK: Final = FOLDER / "node-task"
GUIDE: Final = FOLDER.parent.parent / "docs" / "guides" / "slurm.md"
WAIT_S: Final = 60.0
# In the place of `prfaas`: it keeps its file and arguments, and ends 0.2 s after it is told to.
NODE: Final = """#!/usr/bin/env bash
trap 'sleep 0.2; echo drained >> "$KEPT/log"; exit 3' TERM
cp "$3" "$KEPT/node.toml"
printf '%s\\n' "$@" > "$KEPT/arguments.new" && mv "$KEPT/arguments.new" "$KEPT/arguments"
while true; do sleep 0.05; done
"""
TASK_OF_SLURM: Final = {
    "SLURM_JOB_ID": "71", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "localhost",
}  # fmt: skip


def environment(folder: Path, change: Mapping[str, str] = {}) -> dict[str, str]:
    node = folder / "prfaas"
    node.write_text(NODE)
    node.chmod(0o755)
    (folder / "tmp").mkdir()
    return {
        "PATH": os.environ["PATH"], "TMPDIR": str(folder / "tmp"), "KEPT": str(folder), "PRFAAS": str(node),
        "PRFAAS_REGISTRY": str(folder / "fleet"), "PRFAAS_MODEL": str(folder / "model"), "PRFAAS_HOST": "localhost",
        **TASK_OF_SLURM, **change,
    }  # fmt: skip


def written(folder: Path, change: Mapping[str, str] = {}) -> tuple[NodeConfig, int]:
    """The configuration of a task's node, and the task's status once it was signalled as Slurm does: all of it."""
    with subprocess.Popen([TASK], env=environment(folder, change), start_new_session=True) as task:
        deadline = time.monotonic() + WAIT_S
        while not (folder / "arguments").exists():
            assert task.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(task.pid, signal.SIGURG)
        status = task.wait(WAIT_S)
    assert (folder / "log").read_text() == "drained\n"
    assert not list((folder / "tmp").iterdir())
    command, option, _ = (folder / "arguments").read_text().split()
    return config_from(parser().parse_args([command, option, str(folder / "node.toml")])), status


@pytest.mark.parametrize("script", [JOB, TASK], ids=lambda script: str(script.name))
def test_bash_reads_it(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_a_task_runs_a_node_of_its_own_name_and_ends_as_it_does(tmp_path: Path) -> None:
    node, status = written(tmp_path)
    assert (node.node_id, node.host, node.plain) == ("slurm-71-2", "127.0.0.1", True)
    assert (node.registry, node.model) == (str(tmp_path / "fleet"), str(tmp_path / "model"))
    assert (node.cluster, node.cluster_kind, node.role, node.engine) == ("home", "pd", "decode", "vllm")
    assert status == 3


def test_a_certificate_says_which_node_the_machine_has(tmp_path: Path) -> None:
    more = tmp_path / "more.toml"
    more.write_text("ssd_dir = '/local/ssd'\nssd_bytes = 1073741824\n")
    change = {
        "PRFAAS_CERTIFICATES": "/pki", "PRFAAS_CLUSTER": "east", "PRFAAS_CLUSTER_KIND": "prfaas",
        "PRFAAS_ROLE": "prefill", "PRFAAS_ENGINE": "vllm", "PRFAAS_CACHE_BYTES": "1048576",
        "PRFAAS_DRAIN_S": "120", "PRFAAS_SETTINGS": str(more), "PRFAAS_HOST": "%N",
    }  # fmt: skip
    node, _ = written(tmp_path, change)
    assert (node.node_id, node.control_advertise, node.plain) == ("localhost", "localhost", False)
    assert node.identity is not None
    assert (str(node.identity.certificate), str(node.identity.key)) == ("/pki/localhost.pem", "/pki/localhost.key")
    assert str(node.identity.authority) == "/pki/authority.pem"
    assert (node.cluster, node.cluster_kind, node.role) == ("east", "prfaas", "prefill")
    assert (node.cache_bytes, node.drain_timeout_s, node.ssd_dir) == (1 << 20, 120.0, "/local/ssd")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"PRFAAS_HOST": ""}, "set PRFAAS_HOST"),
        ({"PRFAAS_HOST": "%N.invalid"}, "has no address"),
        ({"PRFAAS_CERTIFICATES": "/pki", "SLURM_LOCALID": "1"}, "--ntasks-per-node=1"),
    ],
)
def test_a_task_that_cannot_be_a_node_says_why(tmp_path: Path, change: Mapping[str, str], said: str) -> None:
    ended = subprocess.run(
        [TASK], env=environment(tmp_path, change), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 2
    assert said in ended.stderr


@pytest.mark.parametrize("missing", ["PRFAAS_REGISTRY", "PRFAAS_MODEL"])
def test_a_job_without_what_it_needs_starts_no_task(tmp_path: Path, missing: str) -> None:
    needed = {key: value for key, value in environment(tmp_path).items() if key != missing}
    ended = subprocess.run([JOB], env=needed, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode != 0
    assert missing in ended.stderr


def test_nodes_have_time_to_drain_before_the_jobs_time_is_up() -> None:
    (before_s,) = re.findall(r"^#SBATCH --signal=URG@(\d+)$", JOB.read_text(), re.MULTILINE)
    (drain_s,) = re.findall(r"PRFAAS_DRAIN_S:-(\d+)", TASK.read_text())
    assert int(before_s) >= int(drain_s) + 60 + ENGINE_STOP_S  # Slurm may signal a minute late


def test_the_guide_names_every_variable() -> None:
    used = set(re.findall(r"\bPRFAAS\w*", JOB.read_text() + TASK.read_text()))
    assert used <= set(re.findall(r"PRFAAS\w*", GUIDE.read_text()))
