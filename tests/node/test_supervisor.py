"""What an engine is started with."""

from pathlib import Path

from node.supervisor import engine_environment
from tests.node.running import config

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def test_a_directory_needs_no_network(tmp_path: Path) -> None:
    for engine in ("embedded", "emulated"):
        assert engine_environment(config(tmp_path, engine=engine), {}).items() >= OFFLINE.items()
    assert engine_environment(config(tmp_path, engine="vllm", model=str(tmp_path)), {}).items() >= OFFLINE.items()


def test_vllm_may_download_what_a_name_stands_for(tmp_path: Path) -> None:
    assert not engine_environment(config(tmp_path, engine="vllm", model="org/name"), {}).keys() & OFFLINE.keys()


def test_what_the_operator_has_set_wins(tmp_path: Path) -> None:
    ours = {"HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "7", "PATH": "/bin"}
    assert engine_environment(config(tmp_path, threads=2), ours).items() >= ours.items()
