"""Secrets from a file: read at the start and on SIGHUP, told to the engine, and never lost to a file that is wrong."""

from pathlib import Path

import pytest

from hybrid_cache.hashing.block_hash import block_hashes, model_salt
from hybrid_cache.hashing.name_secrets import NameSecrets
from node.engine.block_naming import BlockNaming
from node.engine.prefix_cache import EngineCache
from node.errors import NodeConfigError
from tests.node.engine.test_prefix_cache import BLOCK, DENSE, TOKENS, stored
from transport.control.messages import BlockSalts

NEW, OLD = "a1" * 32, "b2" * 32
LAYOUT = DENSE.fingerprint


def test_without_a_file_nothing_is_keyed() -> None:
    naming = BlockNaming("")
    assert naming.fingerprints == ()
    assert naming.model_salts(LAYOUT) == (model_salt(LAYOUT),)


@pytest.mark.parametrize("text", ["", "no secret at all"])
def test_a_node_does_not_start_with_a_file_that_is_wrong(tmp_path: Path, text: str) -> None:
    file = tmp_path / "names.secret"
    with pytest.raises(NodeConfigError, match=r"names_secret: names\.secret: "):
        BlockNaming(str(file))
    file.write_text(text)
    with pytest.raises(NodeConfigError, match=r"names_secret: names\.secret: "):
        BlockNaming(str(file))


def test_a_rotation_is_told_to_the_engine_and_names_what_its_cache_begins(tmp_path: Path) -> None:
    file = tmp_path / "names.secret"
    file.write_text(OLD)
    naming = BlockNaming(str(file))
    cache = EngineCache(DENSE, naming.model_salts(LAYOUT)[0])
    told: list[BlockSalts] = []
    assert naming.read_again(LAYOUT, cache, told.append) == "unchanged"
    assert told == []

    file.write_text(f"{NEW}\n{OLD}")
    assert naming.read_again(LAYOUT, cache, told.append) == "applied"
    both = NameSecrets.of(f"{NEW}\n{OLD}")
    assert told == [BlockSalts(salts=both.model_salts(LAYOUT))]
    assert naming.fingerprints == both.fingerprints
    (held,) = cache.apply([stored(0, 1)])
    assert held.hashes == tuple(block_hashes(TOKENS[:BLOCK], BLOCK, both.model_salts(LAYOUT)[0]))

    file.write_text("gone wrong")
    assert naming.read_again(LAYOUT, cache, told.append) == "refused"
    assert len(told) == 1
    assert naming.secrets == both
    file.write_text(NEW)
    naming.read_again(LAYOUT, None, None)  # no engine is there
    assert naming.fingerprints == both.fingerprints[:1]
