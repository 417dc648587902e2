"""Names of blocks by a file of secrets, which a reload reads again."""

from pathlib import Path

import pytest

from gateway.errors import GatewayConfigError
from gateway.prompt.prompt import Prompt
from gateway.routing.block_naming import by_known_names, name_secrets
from hybrid_cache.hashing.name_secrets import UNKEYED, NameSecrets
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.views import watched
from tests.gateway.worlds import on_loop, until
from transport.control.proto import node_pb2 as pb

NEW, OLD = "a1" * 32, "b2" * 32
ROTATED = NameSecrets.of(f"{NEW}\nnone")
PROMPT = "the quick brown fox jumps over the lazy dog " * 6


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


@on_loop
async def test_after_a_rotation_what_goes_on_is_found_and_what_begins_has_new_names() -> None:
    async with watched(remote=0, decode=1) as w:
        node = w.nodes.local[0]
        await w.holds(node, PROMPT)
        held = w.request(PROMPT).prompt
        w.clusters.rename(ROTATED)

        def known(prompt: Prompt) -> Prompt:
            return by_known_names(prompt, w.clusters.index)

        same, longer, begins = (
            w.request(text).prompt for text in (PROMPT, PROMPT + "and on", PROMPT + PROMPT[:9] * 99)
        )
        assert same.hashes != held.hashes
        assert known(same) == held
        assert known(longer).hashes[: len(held.hashes)] == held.hashes
        assert known(begins) is begins  # most of it is new
        stored = [pb.BlocksStored(group=group, hashes=b"".join(same.hashes)) for group in (0, 1)]
        for each in stored:
            node.tell(pb.NodeEvent(stored=each))
        await until(lambda: known(same) is same)  # as long under its new names
        w.clusters.rename(NameSecrets.of(NEW))
        assert w.request(PROMPT).prompt.earlier is None  # the one before is looked for no more
