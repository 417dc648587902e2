"""From one secret of names to the next, by itself and within a time."""

import os
from pathlib import Path

from gateway.prompt.prompt import Prompt
from gateway.routing.name_rotation import NameOverlap, NameRotation
from hybrid_cache.hashing.name_secrets import NameSecrets
from tests.gateway.views import Watched, watched
from tests.gateway.worlds import config_for, on_loop, until
from transport.control.proto import node_pb2 as pb

NEW, OLD = "a1" * 32, "b2" * 32
BOTH = NameSecrets.of(f"{NEW}\n{OLD}")
NEWEST = BOTH.fingerprints[0]
PROMPT = "the quick brown fox jumps over the lazy dog " * 6
PUT_AT = 1_000.0
LASTS_S = 100.0


def test_nothing_moves_in_the_first_half_and_all_has_at_the_end() -> None:
    overlap = NameOverlap(PUT_AT, LASTS_S)
    assert [overlap.moved(PUT_AT + after) for after in (0, 50, 75, 100, 200)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert [overlap.left_s(PUT_AT + after) for after in (0, 60, 200)] == [100.0, 40.0, 0.0]
    assert NameOverlap(PUT_AT, 0.0).moved(PUT_AT) == 1.0


def rotating(seen: Watched, folder: Path, now: list[float], put_at: float = PUT_AT) -> NameRotation:
    """A gateway that has started with both secrets in its file, at the time that `now` holds."""
    file = folder / "names.secret"
    file.write_text(f"{NEW}\n{OLD}")
    os.utime(file, (put_at, put_at))
    seen.clusters.rename(BOTH)
    config = config_for(seen.nodes, names_secret=file, names_overlap_s=LASTS_S)
    return NameRotation(seen.clusters, config, lambda: now[0])


@on_loop
async def test_prompts_keep_their_cache_at_first_and_all_have_moved_at_the_end(tmp_path: Path) -> None:
    async with watched(remote=0, decode=1) as w:
        await nodes_have(w, BOTH)
        now = [PUT_AT]
        w.clusters.rename(NameSecrets.of(OLD))
        texts = [f"{number} {PROMPT}" for number in range(40)]
        for text in texts:
            await w.holds(w.nodes.local[0], text)
        held = [w.request(text).prompt.hashes for text in texts]
        rotation = rotating(w, tmp_path, now)

        def moved() -> set[int]:
            prompts = enumerate(w.request(text).prompt for text in texts)
            return {number for number, prompt in prompts if rotation.known(prompt).hashes != held[number]}

        seen = [moved()]
        for after_s in (50, 60, 75, 90):
            now[0] = PUT_AT + after_s
            seen.append(moved())
        assert not seen[0]
        assert not seen[1]
        assert 0 < len(seen[2]) < len(seen[3]) < len(seen[4]) < len(texts)
        assert seen[2] < seen[3] < seen[4]  # what has moved stays
        assert (rotation.status().left_s, w.clusters.secrets) == (10.0, BOTH)
        now[0] = PUT_AT + LASTS_S
        assert len(moved()) == len(texts)
        assert w.clusters.secrets == NameSecrets.of(NEW)
        assert w.request(PROMPT).prompt.earlier is None  # and is hashed once
        assert (rotation.status().moved, rotation.status().earlier) == (1.0, BOTH.fingerprints[1])


@on_loop
async def test_the_overlap_begins_when_the_last_node_that_names_blocks_has_the_newest_secret(tmp_path: Path) -> None:
    async with watched(remote=0, decode=1) as w:
        now = [PUT_AT + LASTS_S]
        rotation = rotating(w, tmp_path, now)
        status = rotation.status()
        assert (status.moved, status.left_s) == (0.0, LASTS_S)
        assert set(status.waits_for) == {node.node_id for node in w.nodes.nodes}
        await nodes_have(w, BOTH)
        now[0] += LASTS_S / 2
        status = rotation.status()
        assert (status.moved, status.left_s, status.waits_for) == (0.0, LASTS_S / 2, ())
        now[0] += LASTS_S / 2
        assert names_of(rotation, w).earlier is None
        assert w.clusters.secrets == NameSecrets.of(NEW)
        await nodes_have(w, NameSecrets.of(OLD))  # what is over does not begin again
        assert rotation.status().moved == 1.0


@on_loop
async def test_a_gateway_that_starts_anew_goes_on_where_it_was(tmp_path: Path) -> None:
    async with watched(remote=0, decode=1) as w:
        await nodes_have(w, BOTH)
        assert rotating(w, tmp_path, [PUT_AT + 75.0]).status().moved == 0.5
        assert rotating(w, tmp_path, [PUT_AT], put_at=PUT_AT + 1e6).status().left_s == LASTS_S  # a clock that is ahead
        over = rotating(w, tmp_path, [PUT_AT + LASTS_S])
        assert names_of(over, w).earlier is None


@on_loop
async def test_a_reload_of_the_same_secrets_begins_nothing_anew_and_one_of_others_does(tmp_path: Path) -> None:
    async with watched(remote=0, decode=1) as w:
        await nodes_have(w, BOTH)
        now = [PUT_AT + LASTS_S]
        rotation = rotating(w, tmp_path, now)
        assert names_of(rotation, w).earlier is None
        file = tmp_path / "names.secret"
        config = config_for(w.nodes, names_secret=file, names_overlap_s=LASTS_S)
        os.utime(file, (now[0], now[0]))  # written again, with the same in it
        rotation.configure(config)
        assert rotation.status().moved == 1.0
        file.write_text(NEW)
        rotation.configure(config)
        assert (rotation.status().earlier, w.clusters.secrets) == ("", NameSecrets.of(NEW))
        file.write_text(f"{OLD}\n{NEW}")
        os.utime(file, (now[0], now[0]))
        await nodes_have(w, NameSecrets.of(f"{OLD}\n{NEW}"))
        rotation.configure(config)
        assert (rotation.status().left_s, w.clusters.secrets) == (LASTS_S, NameSecrets.of(f"{OLD}\n{NEW}"))


def names_of(rotation: NameRotation, seen: Watched) -> Prompt:
    return rotation.known(seen.request(PROMPT).prompt)


async def nodes_have(seen: Watched, secrets: NameSecrets) -> None:
    """All nodes describe themselves as having `secrets`."""
    for node in seen.nodes.nodes:
        described = node.description()
        described.name_secrets.extend(secrets.fingerprints)
        node.tell(pb.NodeEvent(description=described))
    await until(
        lambda: all(
            node.info is not None and node.info.name_secrets == secrets.fingerprints for node in seen.clusters.nodes
        )
    )
