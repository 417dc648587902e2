"""What engine tests start from: page lists, engines with a sink, greedy runs."""

import itertools
from collections.abc import Sequence

import numpy as np

from engine.agent.base import Engine
from engine.agent.job_pages import JobKV, MappedArena
from hybrid_cache.layout.layout import ModelLayout
from transport.control.messages import JobPages

BLOCK = 64
CHUNK = 2 * BLOCK


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, count]).integers(4, 512, count).tolist()


def job_pages(layout: ModelLayout, num_tokens: int, lengths: Sequence[int] = (), cached_tokens: int = 0) -> JobPages:
    """Pages 0, 1, 2, … for everything up to `num_tokens`, with snapshots at `lengths` and at the end."""
    page = itertools.count()

    def allocate(group: int) -> tuple[int, ...]:
        return tuple(next(page) for _ in range(layout.pages_per_block(group)))

    num_blocks = -(-num_tokens // layout.block_size)
    is_state = [group in layout.state_groups for group in range(len(layout.groups))]
    return JobPages(
        job="job",
        num_tokens=num_tokens,
        cached_tokens=cached_tokens,
        blocks=tuple(
            () if state else tuple(allocate(g) for _ in range(num_blocks)) for g, state in enumerate(is_state)
        ),
        states=tuple(
            {length: allocate(g) for length in sorted({*lengths, num_tokens})} if state else {}
            for g, state in enumerate(is_state)
        ),
    )


def arena_for(layout: ModelLayout, pages: JobPages) -> MappedArena:
    used = [page for group in pages.blocks for block in group for page in block]
    used += [page for group in pages.states for snapshot in group.values() for page in snapshot]
    return MappedArena.in_memory(layout.page_bytes, max(used) + 1)


def prefill(engine: Engine, tokens: Sequence[int], kv: JobKV, start: int = 0, chunk: int = CHUNK) -> None:
    """Computes tokens [start, all) in chunks that end at every snapshot length; [0, start) is loaded."""
    sequence = engine.new_sequence(len(tokens))
    if start:
        engine.load(sequence, kv, start)
    while sequence.num_tokens < len(tokens):
        here = sequence.num_tokens
        stops = [len(tokens), here + chunk, *(length for length in kv.snapshot_lengths if length > here)]
        engine.prefill(sequence, tokens[here : min(stops)], kv)


def greedy(engine: Engine, kv: JobKV, num_tokens: int, rest: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of a sequence that starts from the pages of a job; `rest` of the prompt is computed here."""
    sequence = engine.new_sequence(num_tokens + len(rest) + count)
    engine.load(sequence, kv, num_tokens)
    if len(rest) > 1:
        engine.prefill(sequence, rest[:-1], None)
    tokens, last = [], rest[-1]
    for _ in range(count):
        last = int(engine.decode([sequence], [last])[0].argmax())
        tokens.append(last)
    return tokens
