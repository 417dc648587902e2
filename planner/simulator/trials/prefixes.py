"""Where the prefixes of a trace are, whatever the threshold will be: in one pass, requests served one after the other.

A linear state serves one length, and who computes a prompt keeps one where it ends. Decode nodes are sent states of prompts that
end with a block, and have those of what they compute and answer themselves; others are with prefill nodes, at home or away. So

    held        the decode node has a state so near a prompt's end that it computes the rest; who else would does not matter
    compared    what a PD cluster lacks: a state of a prompt that went away is not there. A prompt goes away for t below

                    least over the states of it:  max(what the state leaves, t from which on its own prompt stays at home)

Models without states have all that they have seen, in decode nodes, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final

import numpy as np

from planner.model.fitting import FoundPrefixes
from planner.model.profile import KvSize
from planner.model.workload import Trace
from planner.simulator.nodes.caches import SimulatedCache, cache_of, layout_of
from planner.simulator.turns import next_turns

AT_DECODE: Final = 0.0
ServedSeconds = Callable[[float, float], float]


def at_once(computed_tokens: float, answer_tokens: float) -> float:
    """As if nothing took time."""
    return 0.0


def find_prefixes(
    trace: Trace, kv: KvSize, cache_gb: float, increment_tokens: int, served_s: ServedSeconds = at_once
) -> FoundPrefixes:
    """What nodes of a PD cluster with caches of `cache_gb` GB together find; the trace has blocks.

    `served_s(computed, answer)` is what a request takes whose prompt has so many tokens to compute, and its answer so many.
    """
    assert trace.blocks is not None
    size, layout = trace.block_size, layout_of(kv, trace.block_size)
    cache = cache_of(layout, cache_gb * 1e9)
    states = _States(size, increment_tokens, bool(layout.companion_groups))
    following, answers = next_turns(trace), list[tuple[float, int, int]]()  # when, whose, of how many blocks
    cached, compared, held, landed = (np.zeros(len(trace)) for _ in range(4))
    for index, ids in enumerate(trace.blocks):
        now, prompt = float(trace.arrival_s[index]), int(trace.prompt_tokens[index])
        while answers and answers[0][0] <= now:
            _, asked, blocks = heappop(answers)
            answer = trace.blocks[following[asked]][:blocks]
            _pass(cache, f"answer {asked}", answer, blocks * size, now)
            states.keep_answer(answer, int(trace.prompt_tokens[asked]) // size)
        landed[index] = cache.match(ids, prompt).attention_tokens
        pooled = _pass(cache, str(index), ids, prompt, now)
        cached[index], compared[index], held[index] = states.serve(ids, prompt, pooled)
        output = float(trace.output_tokens[index])
        blocks = int(prompt + output) // size
        if blocks * size > prompt and index in following and len(trace.blocks[following[index]]) >= blocks:
            heappush(answers, (now + served_s(prompt - cached[index], output), index, blocks))
    return FoundPrefixes(cached, compared, held, landed)


def _pass(cache: SimulatedCache, name: str, ids: tuple[int, ...], num_tokens: int, now: float) -> int:
    found = cache.begin(name, ids, num_tokens, now)
    cache.end(name, num_tokens, now)
    return found


@dataclass(slots=True)
class _States:
    """From which threshold on a PD cluster has a state, by the block that it ends with; decode nodes have theirs always."""

    block_size: int
    increment_tokens: int
    has_states: bool
    home: dict[int, float] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)

    def serve(self, ids: tuple[int, ...], prompt: int, pooled: int) -> tuple[float, float, float]:
        """The tokens of a prompt that are cached, those that its PD cluster lacks, and 1 if its decode node computes these;
        `pooled` are cached somewhere in the cluster, were no prompt sent away.
        """
        size = self.block_size
        whole, compared, decode = prompt // size, float(prompt), 0
        for count, block in enumerate(ids[: pooled // size], 1):
            if (least := self.home.get(block)) is not None:
                compared = min(compared, max(least, float(prompt - count * size)))
                decode = count if least == AT_DECODE else decode
        compared = max(1.0, compared)
        is_held = bool(decode) and max(1, prompt - decode * size) <= self.increment_tokens
        if is_held:
            compared, pooled = max(1.0, float(prompt - decode * size)), decode * size
        branch = next((count for count, block in enumerate(ids[:whole]) if block not in self.seen), whole)
        left_at = AT_DECODE if is_held else compared
        self._leave(ids[:whole], {branch: left_at, whole: AT_DECODE if prompt % size == 0 else left_at})
        return float(pooled), compared, float(is_held)

    def keep_answer(self, ids: tuple[int, ...], prompt_blocks: int) -> None:
        """A decode node has answered up to the end of these blocks, and simulated ones keep a state where it began, too."""
        self._leave(ids, {prompt_blocks: AT_DECODE, len(ids): AT_DECODE})

    def _leave(self, ids: tuple[int, ...], states: dict[int, float]) -> None:
        """These blocks are cached, with states after so many of them; after all, with decode nodes, where a model has none."""
        self.seen.update(ids)
        if not self.has_states:
            states = dict.fromkeys(range(1, len(ids) + 1), AT_DECODE)
        for count, least in states.items():
            if count:
                self.home[ids[count - 1]] = min(self.home.get(ids[count - 1], inf), least)
