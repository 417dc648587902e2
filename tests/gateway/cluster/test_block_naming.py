"""Names of blocks by a file of secrets, which a reload reads again."""

from pathlib import Path

import pytest

from gateway.cluster.block_naming import name_secrets
from gateway.errors import GatewayConfigError
from hybrid_cache.hashing.name_secrets import UNKEYED, NameSecrets
from tests.gateway.memory.pipeline import on_memory_loop, pipeline

NEW, OLD = "a1" * 32, "b2" * 32


def test_a_file_that_is_wrong_is_named_and_its_secret_is_not(tmp_path: Path) -> None:
    file = tmp_path / "names.secret"
    with pytest.raises(GatewayConfigError, match=r"names_secret: names\.secret: "):
        name_secrets(file)
    file.write_text(NEW[:-1])
    with pytest.raises(GatewayConfigError, match="64 hexadecimal digits") as refusal:
        name_secrets(file)
    assert NEW[:8] not in str(refusal.value)
    assert name_secrets(None) is UNKEYED


def test_a_rotation_reaches_a_gateway_by_a_reload_and_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "names.secret"
    file.write_text(OLD)

    @on_memory_loop
    async def scenario() -> None:
        async with pipeline(names_secret=file) as w:
            clusters = w.clusters
            assert clusters.secrets == NameSecrets.of(OLD)
            before = w.hashes_of("hello " * 40)
            assert (await w.complete("hello " * 40)).status == 200
            file.write_text(f"{NEW}\n{OLD}")
            w.reloads.run()
            assert clusters.secrets == NameSecrets.of(f"{NEW}\n{OLD}")
            assert not set(w.hashes_of("hello " * 40)) & set(before)
            assert (await w.complete("hello " * 40)).status == 200
            file.write_text("gone wrong")
            w.reloads.run()
            assert clusters.secrets == NameSecrets.of(f"{NEW}\n{OLD}")

    scenario()
