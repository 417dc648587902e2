"""Where the prefixes of conversations are: with decode nodes, with prefill nodes at home, or only where a prompt was sent."""

import numpy as np
import pytest

from planner.model.profile import KvSize
from planner.model.workload import Trace
from planner.simulator.trials.prefixes import find_prefixes

HYBRID = KvSize(fixed_bytes=1e6, bytes_per_token=1000)
DENSE = KvSize(bytes_per_token=1000)
SIZE = 512


def found(turns: list[tuple[int, int, list[int]]], kv: KvSize = HYBRID, increment: int = 1024):
    """Turns as (prompt tokens, answer tokens, blocks), one after the other."""
    prompts, answers, blocks = zip(*turns, strict=True)
    trace = Trace(
        name="turns",
        arrival_s=np.arange(len(turns)) * 10.0,
        prompt_tokens=np.array(prompts, dtype=np.float64),
        output_tokens=np.array(answers, dtype=np.float64),
        blocks=tuple(tuple(ids) for ids in blocks),
        block_size=SIZE,
    )
    return find_prefixes(trace, kv, float("inf"), increment)


def test_a_decode_node_computes_what_is_new_after_its_own_answer():
    """The answer ends with a block, at 1536 tokens, and the next prompt goes on from it."""
    turns = found([(1100, 500, [1, 2, 9]), (1700, 10, [1, 2, 3, 4])])
    assert list(turns.held) == [0.0, 1.0]
    assert list(turns.cached_tokens) == [0.0, 1536.0]
    assert list(turns.compared_tokens) == [1100.0, 164.0]


def test_a_decode_node_without_a_state_computes_nothing():
    """The answer ends in the block of the prompt: of linear states only the prefill node has one, at 1024 tokens."""
    turns = [(1100, 10, [1, 2, 9]), (1700, 10, [1, 2, 3, 4])]
    assert list(found(turns).held) == [0.0, 0.0]
    assert list(found(turns).cached_tokens) == [0.0, 1024.0]
    assert list(found(turns, DENSE).held) == [0.0, 1.0]


def test_a_prompt_that_is_sent_whole_is_with_its_decode_node():
    turns = found([(1024, 10, [1, 2]), (1700, 10, [1, 2, 3, 4])])
    assert list(turns.held) == [0.0, 1.0]


def test_increments_beyond_the_limit_are_for_prefill_nodes():
    assert list(found([(1024, 10, [1, 2]), (2048, 10, [1, 2, 3, 4])], increment=1023).held) == [0.0, 0.0]


def test_what_only_prfaas_holds_is_compared_as_if_it_were_not_there():
    """40,000 tokens go away for every t below; so does what follows, which PrfaaS then computes after them."""
    first, second = (40_000, 10, list(range(79))), (42_000, 10, [*range(78), *range(100, 105)])
    turns = found([first, second])
    assert list(turns.cached_tokens) == [0.0, 78.0 * SIZE]
    assert list(turns.compared_tokens) == [40_000.0, 40_000.0]
    assert list(turns.held) == [0.0, 0.0]


def test_a_long_increment_after_a_short_prompt_is_compared_by_itself():
    first, second = (1100, 10, [1, 2, 9]), (30_000, 10, [1, 2, *range(10, 67)])
    assert list(found([first, second]).compared_tokens) == [1100.0, 30_000.0 - 1024]


@pytest.mark.parametrize("kv", [HYBRID, DENSE])
def test_strangers_share_nothing(kv):
    turns = found([(1100, 500, [1, 2, 9]), (1700, 10, [4, 5, 6, 7])], kv)
    assert list(turns.cached_tokens) == [0.0, 0.0]
    assert list(turns.compared_tokens) == [1100.0, 1700.0]


def test_attention_is_with_decode_nodes_whether_a_state_is_or_not():
    """Two prompts share a document: of linear states none is kept where they part, before the second of them has."""
    turns = found([(2100, 10, [1, 2, 3, 4, 9]), (2300, 10, [1, 2, 3, 5, 10])])
    assert list(turns.cached_tokens) == [0.0, 0.0]
    assert list(turns.landed_tokens) == [0.0, 3.0 * SIZE]
