"""Runs of blocks remember and forget what a list of blocks in the order of their uses does."""

from collections import OrderedDict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.eviction.base import Use
from hybrid_cache.eviction.last_uses import LastUses
from hybrid_cache.eviction.reuse import ReuseModel

MOST = 12
TURNS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 8)), min_size=1, max_size=4)


def path_of(turns: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Blocks that are named by all before them, as hashes are."""
    tokens = [token for token, count in turns for _ in range(count)]
    return [tuple(tokens[: stop + 1]) for stop in range(len(tokens))]


class OneByOne:
    """The same, a block at a time."""

    def __init__(self) -> None:
        self.uses: OrderedDict[object, int] = OrderedDict()

    def observe(self, path: Sequence[object]) -> None:
        for key in reversed(path):
            self.uses[key] = self.uses.pop(key, 0) + 1
        while len(self.uses) > MOST:
            self.uses.popitem(last=False)


def remembered(model: ReuseModel, keys: set[object]) -> dict[object, int]:
    uses: LastUses = model._uses
    return {key: run.uses for key in keys if (run := uses.get(key)) is not None}


def lists_what_it_remembers(model: ReuseModel) -> bool:
    uses: LastUses = model._uses
    return all(key in run.keys for key, run in uses._by_key.items()) and len(uses) <= MOST


@given(st.lists(TURNS, max_size=12))
def test_what_is_remembered_of_paths(requests: list[list[tuple[int, int]]]) -> None:
    model, reference, seen = ReuseModel(MOST), OneByOne(), set[object]()
    for number, turns in enumerate(requests):
        path = path_of(turns)
        seen.update(path)
        model.observe(Use(float(number), path))
        reference.observe(path)
        assert remembered(model, seen) == reference.uses
        assert {key for key in seen if model.knows(key)} == reference.uses.keys()
        for key in reference.uses:
            assert model.class_of(key, 99.0)[0] <= number
        assert lists_what_it_remembers(model)


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=9, unique=True), max_size=40))
def test_keys_that_are_not_chained_break_nothing(requests: list[list[int]]) -> None:
    model = ReuseModel(MOST)
    for number, keys in enumerate(requests):
        model.observe(Use(float(number), keys))
        assert lists_what_it_remembers(model)


def test_what_is_used_again_out_of_the_middle_is_not_listed_for_ever() -> None:
    uses, model = 0, ReuseModel(5000)
    model.observe(Use(0.0, list(range(4000))))
    for number in range(3000):
        model.observe(Use(1.0 + number, list(range(1000 + number % 7, 1010))))
        uses = max(uses, model._uses._listed)
    assert uses <= 3 * 4000
