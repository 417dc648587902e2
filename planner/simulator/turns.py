"""Conversations in a trace of blocks: whose prompt goes on from whose."""

from collections.abc import Hashable

from planner.model.workload import Trace


def next_turns(trace: Trace) -> dict[int, int]:
    """For each request the next one whose prompt goes on from it. Traces say what an answer was only there."""
    if trace.blocks is None:
        return {}
    found: dict[int, int] = {}
    holder: dict[int, int] = {}  # the next request, seen from here, that has a block
    for index in reversed(range(len(trace))):
        blocks = trace.blocks[index]
        whole = int(trace.prompt_tokens[index]) // trace.block_size
        if 0 < whole <= len(blocks) and blocks[whole - 1] in holder:
            found[index] = holder[blocks[whole - 1]]
        holder.update(dict.fromkeys(blocks, index))
    return found


def hashes_of(trace: Trace, index: int) -> tuple[Hashable, ...]:
    """Names of a prompt's blocks. The trace must have blocks.

    Caches compare names and never look into them. So a trace's ids will do: none are made, and neighbours lie together in
    memory.
    """
    assert trace.blocks is not None
    return trace.blocks[index]
