"""What the SSD tier does over many blocks. Its files are in a temporary directory; a block has next to no bytes."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.growth.node_paths import BLOCK_TOKENS, chain, layout_of
from benchmarks.growth.paths import Act, GrowthSize
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.layout.layout import ByteRange, ModelLayout
from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.files import FileDisk
from hybrid_cache.tiers.slots import CheckedSlots, SlotBlock
from hybrid_cache.tiers.tiers import Tiers
from node.kvcache.ssd_tier import Ssd

QUEUE_BYTES: Final = 1 << 20
SPARE: Final = 4  # a group has a quarter of its slots and more left: nothing is overwritten


class FilledDisk:
    """A disk tier's files with so many blocks of attention, written as a tier writes them."""

    def __init__(self, size: GrowthSize, folder: Path) -> None:
        self.layout: ModelLayout = layout_of(size.layers)
        self._folder = folder
        self.blocks = chain(size.blocks)
        slot = -(-self.layout.block_bytes(0) // 128) * 128 + 128
        self._capacity_bytes = len(self.layout.groups) * (size.blocks + size.blocks // SPARE + 64) * (slot + 16)
        name = f"{self.layout.fingerprint[:24]}-0.kv"
        data = memoryview(bytes(self.layout.block_bytes(0)))
        empty = bytearray(slot)
        with (folder / name).open("wb") as file:
            for block_hash in self.blocks:
                empty[:128] = CheckedSlots().write(SlotBlock(0, len(data), block_hash), [data], _nowhere)
                file.write(empty)

    def opened(self) -> DiskTier:
        return DiskTier(
            self.layout, FileDisk(self._folder), capacity_bytes=self._capacity_bytes, queue_bytes=QUEUE_BYTES
        )

    async def open_and_close(self) -> None:
        """As an agent does: in a thread."""
        await asyncio.to_thread(lambda: self.opened().close())


def _nowhere(at: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    pass


def _no_views(segments: Sequence[ByteRange]) -> list[memoryview]:
    return []


async def paths(size: GrowthSize) -> AsyncIterator[tuple[str, Act]]:
    """Each with what it does, over one disk."""
    with tempfile.TemporaryDirectory() as folder:
        files = FilledDisk(size, Path(folder))
        yield "SSD: open, save the order", files.open_and_close
        with files.opened() as disk:
            cache = PrefixCache(files.layout, 64)
            ssd, tiers = Ssd(cache, disk, _no_views, lambda: None, lambda: 0.0), Tiers(cache, disk, _no_views)
            prompt = files.blocks[: size.prompt_blocks]

            async def snapshot() -> None:
                for _ in ssd.snapshot():
                    await asyncio.sleep(0)

            async def gain() -> None:
                assert tiers.gain(prompt, len(prompt) * BLOCK_TOKENS, attention_only=True)[1]

            async def report() -> None:
                ssd.report()

            yield "SSD: snapshot", snapshot
            yield "SSD: what it adds to a prompt", gain
            yield "SSD: report", report
