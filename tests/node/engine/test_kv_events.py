"""What a server publishes of its cache, as it comes over a socket: whole, with gaps, and in words that are not understood."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

import msgspec
import pytest

from hybrid_cache.cache.events import BlocksStored, CacheCleared, CacheEvent, Medium
from hybrid_cache.hashing.block_hash import block_hashes, model_salt
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention
from node.engine.kv_events import take_in
from node.engine.prefix_cache import BlockStored, EngineCache

BLOCK = 4
LAYOUT = ModelLayout(model="m", dtype="f", block_size=BLOCK, groups=(KVCacheGroup(FullAttention(64, 32), (0,)),))
SALT = model_salt("m")
TOKENS = list(range(100, 100 + BLOCK))
STORED = BlocksStored(0, tuple(block_hashes(TOKENS, BLOCK, SALT)), Medium.ENGINE)
CLEARED = CacheCleared(Medium.ENGINE)

Message = list[bytes]


def message(sequence: int, *events: object) -> Message:
    return [b"", sequence.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, events])]


def stored() -> BlockStored:
    return BlockStored(block_hashes=[7], parent_block_hash=None, token_ids=TOKENS, block_size=BLOCK)


def heard(messages: Iterable[Message]) -> list[CacheEvent]:
    """What gateways are told of these messages."""

    async def come() -> AsyncIterator[Message]:
        for each in messages:
            yield each

    told: list[CacheEvent] = []
    asyncio.run(take_in(come(), EngineCache(LAYOUT, SALT), told.append))
    return told


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_comes_in_order_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert heard([message(0), message(1, stored()), message(2)]) == [STORED]
    assert not warnings(caplog)


def test_after_a_gap_the_cache_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    assert heard([message(0, stored()), message(2, stored())]) == [STORED, CLEARED, STORED]
    assert warnings(caplog) == ["engine's cache events lost: 2 came after 0"]


def test_words_of_a_later_release_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    later = [message(number, {"type": "BlockMoved"}) for number in range(100)]
    later[50:51] = [message(50, stored())]
    assert heard(later) == [CLEARED, STORED]
    assert len(warnings(caplog)) == 1
    assert "BlockMoved" in warnings(caplog)[0]
