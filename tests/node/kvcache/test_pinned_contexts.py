"""Contexts live on when a request finds their blocks, and watchers hear of them."""

from pathlib import Path

from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.hashing.block_hash import block_hashes
from node.config import NodeConfig
from node.control.broadcast import Broadcast, Watcher
from node.kvcache.arena import Arena
from node.kvcache.pages import ArenaPages
from node.kvcache.pinned_contexts import PinnedContexts
from tests.pd_cluster.handover import LAYOUT, run
from transport.control.proto import node_pb2 as pb

TOKENS = list(range(100, 100 + 4 * LAYOUT.block_size))
HASHES = block_hashes(TOKENS, LAYOUT.block_size, b"")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def heard(watcher: Watcher) -> pb.Context | None:
    """The next that is said of a context; None if there is nothing."""
    while (event := await watcher.next(0.001)) is not None:  # what was said is in its queue already
        if event.HasField("context"):
            return event.context
    return None


def test_a_context_lives_on_when_it_is_found_and_watchers_hear_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock, events = Clock(), Broadcast()
        config = NodeConfig(
            node_id="n",
            cluster="c",
            cluster_kind="pd",
            role="decode",
            model="m",
            run_dir=str(tmp_path),
            cache_bytes=1 << 20,
        )
        arena = Arena(tmp_path / "arena", 1 << 20)
        pages = ArenaPages(LAYOUT, arena, config, events, clock)
        contexts = PinnedContexts(pages, clock)

        def compute(name: str) -> None:
            pages.reserve(name, HASHES, len(TOKENS), Purpose.PREFILL)
            pages.commit(name, len(TOKENS))
            pages.release(name)

        compute("first")
        with events.watch() as watcher:
            request = pb.ContextRequest(
                context_id="c", block_hashes=b"".join(HASHES), num_tokens=len(TOKENS), ttl_s=10.0, owner="acme"
            )
            made = await contexts.create(request)
            told = await heard(watcher)
            assert told == made
            assert (made.added_tokens, made.owned_tokens, made.owner) == (len(TOKENS), len(TOKENS), "acme")
            clock.now = 6.0
            compute("second")
            told = await heard(watcher)
            assert told is not None
            assert (told.ttl_s, told.ended) == (10.0, False)
            clock.now = 6.5
            compute("third")
            assert await heard(watcher) is None  # so soon after the last time
            assert not contexts.delete("c", "globex")
            clock.now = 15.9
            contexts.expire()
            assert [context.context_id for context in contexts.messages()] == ["c"]
            clock.now = 16.6
            contexts.expire()
            told = await heard(watcher)
            assert told is not None
            assert (told.context_id, told.ended, told.owned_tokens) == ("c", True, 0)
        pages.cache.check_integrity()
        assert pages.cache.report().pages_locked == 0
        arena.close()

    run(scenario())
