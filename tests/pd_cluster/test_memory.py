from dataclasses import replace
from pathlib import Path

import pytest

from node.config import NodeConfig
from pd_cluster.conversion import Command, CommandOutcome, Conversion, ConversionPhase, step
from pd_cluster.memory import RoleMemory


def config(tmp_path: Path, role: str = "prefill") -> NodeConfig:
    return NodeConfig(
        node_id="n", cluster="west", cluster_kind="pd", role=role, model="m", run_dir=str(tmp_path)
    )  # fmt: skip


CONVERTED = Conversion(
    role="decode", epoch=3, target="decode", outcome=CommandOutcome.CONVERTED, attempt=2, drain_s=1.0
)


def test_a_node_starts_in_the_role_of_its_configuration(tmp_path: Path) -> None:
    assert RoleMemory(config(tmp_path)).recall() == Conversion(role="prefill", target="prefill")


def test_a_converted_node_comes_back_converted(tmp_path: Path) -> None:
    RoleMemory(config(tmp_path)).write(CONVERTED)
    again = RoleMemory(config(tmp_path)).recall()
    assert (again.role, again.epoch, again.outcome) == ("decode", 3, CommandOutcome.CONVERTED)
    assert [path.name for path in tmp_path.iterdir()] == ["n.role.json"]


def test_what_the_operator_wrote_since_counts_and_epochs_go_on(tmp_path: Path) -> None:
    RoleMemory(config(tmp_path)).write(Conversion(role="prefill", epoch=4, target="prefill"))
    again = RoleMemory(config(tmp_path, role="decode")).recall()
    assert (again.role, again.epoch) == ("decode", 4)


def test_who_ended_in_the_middle_comes_back_in_the_old_role(tmp_path: Path) -> None:
    under_way = Conversion(role="prefill", epoch=5, target="decode", phase=ConversionPhase.VERIFYING, attempt=1)
    RoleMemory(config(tmp_path)).write(under_way)
    again = RoleMemory(config(tmp_path)).recall()
    assert (again.role, again.epoch, again.phase) == ("prefill", 5, ConversionPhase.STEADY)
    assert (again.target, again.outcome) == ("decode", CommandOutcome.INTERRUPTED)


def test_an_epoch_that_would_lock_conversion_for_ever_is_forgotten(tmp_path: Path) -> None:
    RoleMemory(config(tmp_path)).write(replace(CONVERTED, epoch=2**64 - 1))
    again = RoleMemory(config(tmp_path)).recall()
    assert (again.role, again.epoch) == ("decode", 0)
    command = Command(epoch=1, role="prefill", drain_timeout_s=1.0, verify_timeout_s=1.0)
    assert step(again, command, 0.0).conversion.is_converting


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"{}",
        b'{"configured":"prefill","role":"both","epoch":1,"target":"decode","outcome":""}',
        b'{"configured":"prefill","role":"decode","epoch":-1,"target":"decode","outcome":"converted"}',
        b'{"configured":"prefill","role":"decode","epoch":1,"target":"decode","outcome":"what"}',
    ],
)
def test_a_file_that_makes_no_sense_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "n.role.json").write_bytes(content)
    assert RoleMemory(config(tmp_path)).recall() == Conversion(role="prefill", target="prefill")
