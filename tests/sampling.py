"""A sample of a suite that is too long to run whole for every change: `pytest --sample N --sample-seed S`.

Every test has values in some dimensions: which test it is, and what it is parametrised with. A sample has every value, and
every pair of values that some test has together; what is left of its size is drawn by the seed. Another seed finds
another cover and draws others. What was left out is printed. The seed may come from PRFAAS_SAMPLE_SEED as well.

    @pytest.mark.dimensions(route="remote", num_tokens=None)   adds a dimension; takes one away that a parameter made
    --sample-limit case=2                                      two values of `case`, drawn by the seed: where each one costs
                                                               a start of its own, other seeds have the others

Inside a suite that runs at every change, a test or a module whose many cases are variants of one property is marked:

    @pytest.mark.rotating                                      `--rotate S` runs as few of its cases as have each test and
                                                               each value once; pairs of values come and go with the seed
    @pytest.mark.rotating("name")                              tests of a module that have a name in common cover together
    pytestmark = pytest.mark.turns                             `--rotate S` runs one half of a module's tests: for tests that
                                                               start whole processes each

Greedy cover of pairs: Cohen, Dalal, Fredman, Patton, "The AETG System" (1997).
"""

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final

import pytest

SEED_VARIABLE: Final = "PRFAAS_SAMPLE_SEED"
MARKER: Final = "dimensions"
ROTATING: Final = "rotating"
TURNS: Final = "turns"
TEST: Final = "test"  # the dimension that every test has

Value = tuple[str, str]
"""A dimension and a value in it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A test, and its value in each of its dimensions."""

    name: str
    values: Mapping[str, str]

    def combinations(self, pairs: bool) -> frozenset[tuple[Value, ...]]:
        """What it covers: each value alone, and each pair of values."""
        values = sorted(self.values.items())
        return frozenset([(value,) for value in values] + (list(combinations(values, 2)) if pairs else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Names in the order of the candidates. `covered` of `total` of what a sample counts are among the chosen."""

    chosen: tuple[str, ...]
    left_out: tuple[str, ...]
    covered: int
    total: int
    counts: str = "values and pairs of values"


def draw(
    candidates: Sequence[Candidate],
    size: int,
    seed: str,
    limits: Mapping[str, int] | None = None,
    *,
    pairs: bool = True,
) -> Sample:
    """Covers all pairs with as few candidates as a greedy choice finds, then fills up to `size` by chance.

    `size` 0 leaves it at the cover. Where the cover has no room in `size`, the part of it that covers most comes first.
    `limits`: of how many values of a dimension there may be candidates; those without the dimension are not meant.
    Without `pairs` it covers values alone.
    """
    order = list(candidates)
    rng = random.Random(seed)
    rng.shuffle(order)
    covers = {candidate.name: candidate.combinations(pairs) for candidate in order}
    assert len(covers) == len(order), "names are not unique"
    allowed = {candidate.name: covers[candidate.name] for candidate in _within(order, limits or {}, rng)}
    cover = _cover(allowed)
    others = [name for name in allowed if name not in set(cover)]
    picked = set([*cover, *others[: max(0, size - len(cover))]][: size or len(cover)])
    return Sample(
        chosen=tuple(candidate.name for candidate in candidates if candidate.name in picked),
        left_out=tuple(candidate.name for candidate in candidates if candidate.name not in picked),
        covered=len(frozenset().union(*(covers[name] for name in picked))),
        total=len(frozenset().union(*covers.values())),
    )


def _within(order: Sequence[Candidate], limits: Mapping[str, int], rng: random.Random) -> Sequence[Candidate]:
    for dimension, number in limits.items():
        values = sorted({candidate.values[dimension] for candidate in order if dimension in candidate.values})
        kept = {None, *rng.sample(values, min(number, len(values)))}
        order = [candidate for candidate in order if candidate.values.get(dimension) in kept]
    return order


def _cover(covers: Mapping[str, frozenset[tuple[Value, ...]]]) -> list[str]:
    """Names that together cover everything; each adds the most that one can, the first in order where several do."""
    missing = set().union(*covers.values())
    chosen: list[str] = []
    while missing:
        best = max(covers, key=lambda name: len(covers[name] & missing))
        chosen.append(best)
        missing -= covers[best]
    return chosen


def rotate(candidates: Mapping[str, Candidate], groups: Mapping[str, str], seed: str) -> Sample:
    """Each group has a cover of its values. `groups`: of a candidate's name; those without one are not meant."""
    members: dict[str, list[Candidate]] = defaultdict(list)
    for name, group in groups.items():
        members[group].append(candidates[name])
    samples = [draw(alike, 0, f"{seed} {group}", pairs=False) for group, alike in sorted(members.items())]
    return Sample(
        chosen=tuple(name for sample in samples for name in sample.chosen),
        left_out=tuple(name for sample in samples for name in sample.left_out),
        covered=sum(sample.covered for sample in samples),
        total=sum(sample.total for sample in samples),
        counts="values",
    )


def take_turns(modules: Mapping[str, Sequence[str]], seed: str) -> Sample:
    """Of the tests of each module one half, with all of their cases; of an odd number the larger half."""
    chosen: list[str] = []
    left_out: list[str] = []
    covered = total = 0
    for module, names in sorted(modules.items()):
        tests = list(dict.fromkeys(map(_test_of, names)))
        meant = set(random.Random(f"{seed} {module}").sample(tests, (len(tests) + 1) // 2))
        for name in names:
            (chosen if _test_of(name) in meant else left_out).append(name)
        covered, total = covered + len(meant), total + len(tests)
    return Sample(chosen=tuple(chosen), left_out=tuple(left_out), covered=covered, total=total, counts="values")


def _test_of(name: str) -> str:
    return name.partition("[")[0]


def compact(names: Sequence[str]) -> Iterator[str]:
    """Test ids, one line per test: `path::test[a] [b] [c]`."""
    by_test: dict[str, list[str]] = defaultdict(list)
    for name in names:
        test, bracket, parameters = name.partition("[")
        by_test[test].append(bracket + parameters)
    for test, cases in by_test.items():
        yield test + " ".join(cases)


# pytest's side; tests/conftest.py takes these hooks up.


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample")
    group.addoption(
        "--sample", type=int, metavar="N", help="run a sample of N tests that covers all pairs; 0: the cover alone"
    )
    group.addoption(
        "--sample-limit",
        type=_limit,
        action="append",
        default=[],
        metavar="DIM=K",
        help="of the values of a dimension only K, drawn by the seed",
    )
    group.addoption("--sample-seed", metavar="S", help=f"which sample (default: {SEED_VARIABLE} of the environment)")
    group.addoption("--rotate", metavar="S", help=f"of what is marked `{ROTATING}`, run the few cases that S draws")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(**values): what a sample of tests has to cover; None: nothing")
    config.addinivalue_line("markers", f"{ROTATING}(name): cases of one property, of which --rotate draws a few")
    config.addinivalue_line("markers", f"{TURNS}: tests that start processes, of which --rotate draws one half")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size, turn = config.getoption("sample"), config.getoption("rotate")
    if size is None and turn is None:
        return
    candidates = {item.nodeid: Candidate(item.nodeid, dimensions(item)) for item in items}
    assert len(candidates) == len(items), "names are not unique"
    if size is None:
        seed = turn
        sample = _rotated(items, candidates, seed)
    else:
        seed = config.getoption("sample_seed") or os.environ.get(SEED_VARIABLE)
        if not seed or turn is not None:
            raise pytest.UsageError(f"--sample needs --sample-seed, or {SEED_VARIABLE}, and goes without --rotate")
        sample = draw(list(candidates.values()), size, seed, dict(config.getoption("sample_limit")))
    config.stash[_SAMPLE] = (seed, sample)
    out = set(sample.left_out)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return _summary(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in (*_summary(config), *_left_out(config)):
        terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist, which collects, tells what it drew; all of them draw the same."""
    if _SAMPLE in session.config.stash and hasattr(session.config, "workeroutput"):
        seed, sample = session.config.stash[_SAMPLE]
        session.config.workeroutput["sample"] = {"seed": seed, **asdict(sample)}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The process that prints has collected nothing; it hears from its workers."""
    if told := dict(getattr(node, "workeroutput", {})).pop("sample", None):
        node.config.stash[_SAMPLE] = (told.pop("seed"), Sample(**told))


def _rotated(items: Sequence[pytest.Item], candidates: Mapping[str, Candidate], seed: str) -> Sample:
    """What is marked takes turns: first tests, then cases of those that are left."""
    modules: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(TURNS) is not None:
            modules[item.nodeid.partition("::")[0]].append(item.nodeid)
    tests = take_turns(modules, seed)
    resting = set(tests.left_out)
    cases = rotate(
        candidates,
        {item.nodeid: group for item in items if item.nodeid not in resting and (group := group_of(item)) is not None},
        seed,
    )
    out = set(cases.left_out)
    return Sample(
        chosen=(*(name for name in tests.chosen if name not in out), *cases.chosen),
        left_out=(*tests.left_out, *cases.left_out),
        covered=tests.covered + cases.covered,
        total=tests.total + cases.total,
        counts=cases.counts,
    )


def dimensions(item: pytest.Item) -> dict[str, str]:
    """A test's values: its name, its parameters, and what its markers say; the closest marker wins."""
    values: dict[str, Any] = {TEST: _test_of(item.nodeid)}
    if (spec := getattr(item, "callspec", None)) is not None:
        values |= spec.params
    for mark in reversed(list(item.iter_markers(MARKER))):
        values |= mark.kwargs
    return {name: str(value) for name, value in values.items() if value is not None}


def group_of(item: pytest.Item) -> str | None:
    """Which cases cover together: those of the test or the module that is marked, or all that have the marker's name."""
    for node, mark in item.iter_markers_with_node(ROTATING):
        module = item.nodeid.partition("::")[0]
        return f"{module} {mark.args[0]}" if mark.args else _test_of(node.nodeid)
    return None


def _limit(text: str) -> tuple[str, int]:
    dimension, _, number = text.partition("=")
    return dimension, int(number)


_SAMPLE: Final = pytest.StashKey[tuple[str, Sample]]()


def _summary(config: pytest.Config) -> list[str]:
    if _SAMPLE not in config.stash:
        return []
    seed, sample = config.stash[_SAMPLE]
    total = len(sample.chosen) + len(sample.left_out)
    return [
        f"sample: {len(sample.chosen)} of {total} tests, seed {seed}, "
        f"{sample.covered} of {sample.total} {sample.counts} covered"
    ]


def _left_out(config: pytest.Config) -> Iterator[str]:
    if _SAMPLE in config.stash:
        yield from (f"  left out: {line}" for line in compact(config.stash[_SAMPLE][1].left_out))
