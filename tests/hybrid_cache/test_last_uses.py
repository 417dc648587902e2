"""Runs of blocks remember and forget what a list of blocks in the order of their uses does."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from math import log2

from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.eviction.base import Use
from hybrid_cache.eviction.reuse import ReuseModel
from tests.hybrid_cache.sizes import size_of

MOST = 12
TURNS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 8)), min_size=1, max_size=4)


def path_of(turns: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Blocks that are named by all before them, as hashes are."""
    tokens = [token for token, count in turns for _ in range(count)]
    return [tuple(tokens[: stop + 1]) for stop in range(len(tokens))]


class OneByOne:
    """The same, a block at a time: when a block was last used, how often, and what tells its class from others."""

    def __init__(self) -> None:
        self.uses: OrderedDict[object, tuple[float, int, object]] = OrderedDict()

    def observe(self, now: float, path: Sequence[object]) -> None:
        seen = len(list(takewhile(self.uses.__contains__, path)))
        shape = 0 if not seen else 1 if seen < len(path) / 2 else 2, int(log2(len(path) - seen + 1))
        for key in reversed(path):
            uses = 1 + (self.uses.pop(key)[1] if key in self.uses else 0)
            often = next(number for number, most in enumerate((1, 2, 4, 16, 1 << 20)) if uses <= most)
            self.uses[key] = now, uses, (shape, often, key is path[-1])
        while len(self.uses) > MOST:
            self.uses.popitem(last=False)


@given(st.lists(TURNS, max_size=12))
def test_what_is_remembered_of_paths(requests: list[list[tuple[int, int]]]) -> None:
    model, reference, seen = ReuseModel(MOST), OneByOne(), set[object]()
    classes: dict[object, int] = {}
    for number, turns in enumerate(requests):
        now, path = float(number), path_of(turns)
        seen.update(path)
        model.observe(Use(now, path))
        reference.observe(now, path)
        assert {key for key in seen if model.knows(key)} == reference.uses.keys()
        for key, (at, _, what) in reference.uses.items():
            assert model.class_of(key, 99.0) == (at, classes.setdefault(what, model.class_of(key, 99.0)[1]))
    assert len(set(classes.values())) == len(classes)


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=9, unique=True), max_size=40))
def test_keys_that_are_not_chained_break_no_bound(requests: list[list[int]]) -> None:
    model = ReuseModel(MOST)
    for number, keys in enumerate(requests):
        model.observe(Use(float(number), keys))
        assert sum(map(model.knows, range(21))) <= MOST


def test_what_is_used_again_without_what_is_before_it_is_not_listed_for_ever() -> None:
    model = ReuseModel(5000)
    model.observe(Use(0.0, list(range(600))))
    early = size_of(model)
    for start in range(1, 600):
        model.observe(Use(float(start), list(range(start, 600))))
    assert size_of(model) <= early + (1 << 19)
