"""Small caches of vLLM's shape."""

from engine.vllm.layout import CacheLayer, LayerKind, VllmLayout, vllm_layout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from transport.control.messages import JobPages

BLOCK = 4


def full(name: str, *, table: int = 0, part_bytes: int = 64 * BLOCK, parts: int = 1) -> CacheLayer:
    return CacheLayer(
        name=name, table=table, kind=LayerKind.FULL, block_tokens=BLOCK, part_bytes=part_bytes, parts=parts
    )


def window(name: str, *, tokens: int, table: int = 0, part_bytes: int = 64 * BLOCK, parts: int = 1) -> CacheLayer:
    return CacheLayer(
        name=name,
        table=table,
        kind=LayerKind.WINDOW,
        block_tokens=BLOCK,
        part_bytes=part_bytes,
        parts=parts,
        window=tokens,
    )


def state(name: str, *, table: int = 0, part_bytes: int = 300, parts: int = 1, block_tokens: int = BLOCK) -> CacheLayer:
    return CacheLayer(
        name=name, table=table, kind=LayerKind.STATE, block_tokens=block_tokens, part_bytes=part_bytes, parts=parts
    )


def layout_of(*layers: CacheLayer, ranks: int = 1, stages: int = 1) -> VllmLayout:
    return vllm_layout(layers, model="tiny", dtype="float32", block_tokens=BLOCK, ranks=ranks, stages=stages)


def pages_for(layout: VllmLayout, num_tokens: int, *, job: str = "j", cached: int = 0, first: int = 0) -> JobPages:
    """Pages for everything that a prefill of `num_tokens` tokens keeps: a state at its end only."""
    page, blocks, states = first, [], []
    for group, entry in enumerate(layout.model.groups):
        kept: list[tuple[int, ...]] = []
        lengths: dict[int, tuple[int, ...]] = {}
        size = layout.model.pages_per_block(group)
        live = range(-(-num_tokens // layout.model.block_size))
        if isinstance(entry.spec, LinearState):
            lengths[num_tokens] = tuple(range(page, page + size))
            page += size
            live = range(0)
        wanted = layout.model.window_blocks(group, num_tokens) if isinstance(entry.spec, SlidingWindow) else live
        for block in live:
            if block in wanted:
                kept.append(tuple(range(page, page + size)))
                page += size
            else:
                kept.append(())
        assert isinstance(entry.spec, FullAttention | SlidingWindow | LinearState)
        blocks.append(tuple(kept))
        states.append(lengths)
    return JobPages(job=job, num_tokens=num_tokens, cached_tokens=cached, blocks=tuple(blocks), states=tuple(states))


def num_pages(*pages: JobPages) -> int:
    """Enough pages for these jobs."""
    held = [page for job in pages for group in job.blocks for block in group for page in block]
    held += [page for job in pages for group in job.states for state_pages in group.values() for page in state_pages]
    return max(held, default=0) + 1


def tables_for(layout: VllmLayout, num_tokens: int, *, first: int = 1) -> tuple[tuple[int, ...], ...]:
    """Block tables as vLLM fills them: every block of attention, of states the last one."""
    count = -(-num_tokens // layout.model.block_size)
    tables: dict[int, tuple[int, ...]] = {}
    for place in layout.places:
        ids = tuple(range(first, first + count))
        if place.layer.kind is LayerKind.STATE:
            ids = (*(0 for _ in ids[:-1]), ids[-1]) if place.layer.block_tokens == BLOCK else ids[-1:]
        tables[place.layer.table] = ids
    return tuple(tables[number] for number in range(len(tables)))
