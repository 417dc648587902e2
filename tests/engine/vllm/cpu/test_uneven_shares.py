"""Two ranks, as threads of one process, that exchange different numbers of tokens."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from engine.vllm.cpu.uneven_shares import gather_shares, own_share_of_sum

SIZES = (3, 1)


def on_both_ranks(work: Callable[[Any], Any]) -> list[Any]:
    """What each rank comes to, with a group of gloo's between them."""
    store = dist.HashStore()

    def on(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, len(SIZES))
        return work(SimpleNamespace(rank_in_group=rank, world_size=len(SIZES), device_group=group))

    with ThreadPoolExecutor(len(SIZES)) as ranks:
        return list(ranks.map(on, range(len(SIZES))))


def test_each_rank_has_what_all_have() -> None:
    def gathered(rank: Any) -> Any:
        own = torch.full((SIZES[rank.rank_in_group], 2), float(rank.rank_in_group))
        return gather_shares(rank, [own, 10 * own.long()], 0, SIZES)

    for hidden, numbers in on_both_ranks(gathered):
        assert hidden.tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]]
        assert numbers.tolist() == [[0, 0]] * 3 + [[10, 10]]


def test_each_rank_has_its_own_tokens_of_the_sum() -> None:
    parts = torch.arange(8.0).reshape(4, 2)
    first, second = on_both_ranks(lambda rank: own_share_of_sum(rank, parts, 0, SIZES))
    assert first.tolist() == (2 * parts[:3]).tolist()
    assert second.tolist() == (2 * parts[3:]).tolist()


def test_shares_are_equal_where_no_sizes_are_said() -> None:
    whole = torch.arange(2.0)
    assert [each.tolist() for each in on_both_ranks(lambda rank: own_share_of_sum(rank, whole))] == [[0.0], [2.0]]
    assert [each.tolist() for each in on_both_ranks(lambda rank: gather_shares(rank, whole[:1]))] == [[0.0, 0.0]] * 2
