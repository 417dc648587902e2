import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.sampling import SEED_VARIABLE, Candidate, compact, draw, rotate, take_turns

ROOT = Path(__file__).parent.parent


def grid(**dimensions: str) -> list[Candidate]:
    """Every combination of one letter per dimension."""
    return [
        Candidate("".join(letters), dict(zip(dimensions, letters, strict=True)))
        for letters in product(*dimensions.values())
    ]


def pairs(names: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
    return {(i, name[i], j, name[j]) for name in names for i in range(len(name)) for j in range(i)}


def test_a_cover_has_every_pair_with_few_tests() -> None:
    candidates = grid(model="abcdef", route="xy", hit="012", length="pqr", load="kl")
    sample = draw(candidates, 0, "s")
    assert pairs(sample.chosen) == pairs(tuple(candidate.name for candidate in candidates))
    assert sample.covered == sample.total
    assert 18 <= len(sample.chosen) <= 27  # 6 × 3 pairs of the two largest; 216 tests in all


def test_what_is_left_of_a_sample_is_drawn_by_the_seed() -> None:
    candidates = grid(model="abcdef", hit="012", length="pqr")
    samples = [draw(candidates, 30, str(seed)) for seed in range(8)]
    assert {len(sample.chosen) for sample in samples} == {30}
    assert len({sample.chosen for sample in samples}) == 8
    seen = set().union(*(sample.chosen for sample in samples))
    assert seen == {candidate.name for candidate in candidates}, "what one leaves out another has"


def test_a_seed_says_which() -> None:
    candidates = grid(model="abc", hit="012", length="pqr")
    assert draw(candidates, 12, "one") == draw(candidates, 12, "one")


def test_nothing_is_lost_between_chosen_and_left_out() -> None:
    candidates = grid(model="abc", hit="012")
    sample = draw(candidates, 4, "s")
    names = [candidate.name for candidate in candidates]
    assert sorted((*sample.chosen, *sample.left_out)) == names
    assert list(sample.chosen) == [name for name in names if name in sample.chosen], "in their own order"


def test_a_sample_without_room_for_the_cover_says_what_it_lacks() -> None:
    sample = draw(grid(model="abc", hit="012"), 4, "s")
    assert len(sample.chosen) == 4
    assert (sample.covered, sample.total) == (3 + 3 + 4, 3 + 3 + 9)


def test_a_limit_leaves_values_to_other_seeds() -> None:
    candidates = [*grid(model="abcdef", hit="012"), Candidate("alone", {"test": "alone"})]
    samples = [draw(candidates, 0, str(seed), {"model": 2}) for seed in range(20)]
    assert all("alone" in sample.chosen for sample in samples)
    assert {len({name for name in sample.chosen if name != "alone"}) for sample in samples} == {2 * 3}
    assert {name[0] for sample in samples for name in sample.chosen} == set("abcdef")
    assert samples[0].covered < samples[0].total, "what a limit costs is said"


def test_tests_without_parameters_are_always_there() -> None:
    alone = [Candidate(f"alone{number}", {"test": str(number)}) for number in range(3)]
    sample = draw([*grid(model="abc", hit="012", length="pqr"), *alone], 0, "s")
    assert {candidate.name for candidate in alone} <= set(sample.chosen)


def test_each_group_of_a_rotation_has_each_value_once_and_other_pairs_with_each_seed() -> None:
    candidates = {candidate.name: candidate for candidate in grid(model="abcdef", hit="012", length="pqr")}
    groups = {name: "deep" if name[0] in "abc" else "wide" for name in candidates}
    samples = [rotate(candidates, groups, str(seed)) for seed in range(60)]
    for sample in samples:
        assert {letter for name in sample.chosen for letter in name} == set("abcdef012pqr")
        assert all(
            set("012pqr") < set("".join(n for n in sample.chosen if groups[n] == group)) for group in ("deep", "wide")
        )
        assert len(sample.chosen) <= 2 * 4
        assert sorted((*sample.chosen, *sample.left_out)) == sorted(candidates)
        assert sample.covered == sample.total == 2 * 9
    assert {name for sample in samples for name in sample.chosen} == set(candidates), "each has its turn"
    assert samples[3] == rotate(candidates, groups, "3")


def test_tests_take_turns_by_halves_and_keep_their_cases() -> None:
    modules = {"a.py": ["a::one", "a::two[x]", "a::two[y]", "a::three"], "b.py": ["b::one", "b::two"]}
    names = [name for module in modules.values() for name in module]
    samples = [take_turns(modules, str(seed)) for seed in range(30)]
    for sample in samples:
        assert (sample.covered, sample.total) == (3, 5)
        assert ("a::two[x]" in sample.chosen) == ("a::two[y]" in sample.chosen)
        assert sorted((*sample.chosen, *sample.left_out)) == sorted(names)
    assert {name for sample in samples for name in sample.chosen} == set(names), "each has its turn"
    assert samples[3] == take_turns(modules, "3")


def test_more_than_there_are_is_all() -> None:
    assert draw(grid(model="ab", hit="01"), 100, "s").left_out == ()


def test_what_is_left_out_takes_a_line_per_test() -> None:
    assert list(compact(["f::t[a]", "f::u", "f::t[b-c]"])) == ["f::t[a] [b-c]", "f::u"]


SUITE = """
import pytest

@pytest.mark.parametrize("model", "abc")
@pytest.mark.parametrize("hit", [0, 1])
@pytest.mark.parametrize("length", [1, 2])
def test_many(model, hit, length): pass

@pytest.mark.dimensions(number=None)
@pytest.mark.parametrize("number", range(50))
def test_alike(number): pass

@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.dimensions(n=n > 2)) for n in range(5)])
def test_classes(n): pass

@pytest.mark.slow
def test_not_meant(): pass

@pytest.mark.rotating
@pytest.mark.parametrize("model", "xyz")
@pytest.mark.parametrize("hit", [0, 1])
def test_of_one_property(model, hit): pass

@pytest.mark.rotating("both")
@pytest.mark.parametrize("model", "xyz")
def test_one_side(model): pass

@pytest.mark.rotating("both")
@pytest.mark.parametrize("model", "xyz")
def test_other_side(model): pass
"""


def run(folder: Path, *arguments: str, **environment: str) -> str:
    (folder / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.sampling import *\n"
    )
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "not slow", *arguments]
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # hypothesis alone takes as long to load as the rest
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False).stdout


def test_pytest_runs_the_sample_and_prints_the_rest(tmp_path: Path) -> None:
    output = run(tmp_path, "--sample", "0", "--sample-seed", "abc")
    # 6 pairs of model and hit, one of fifty alike, one of each class; six pairs of rotating tests, and six more
    assert "sample: 21 of 79 tests, seed abc, " in output
    assert "21 passed" in output
    assert "left out: test_suite.py::test_many[" in output
    assert "test_not_meant" not in output


def test_workers_tell_what_they_drew(tmp_path: Path) -> None:
    alone = run(tmp_path, "--sample", "0", "--sample-seed", "abc").splitlines()
    spread = run(tmp_path, "--sample", "0", "--sample-seed", "abc", "-p", "xdist", "-n", "2").splitlines()
    said = [line for line in alone if "left out:" in line or line.startswith("sample:")]
    assert said
    assert set(said) <= set(spread)
    assert any("21 passed" in line for line in spread)


def test_the_seed_may_come_from_the_environment_and_must_come(tmp_path: Path) -> None:
    assert "seed of-env," in run(tmp_path, "--sample", "20", **{SEED_VARIABLE: "of-env"})
    assert "passed" not in run(tmp_path, "--sample", "20")


def test_without_the_option_everything_runs(tmp_path: Path) -> None:
    output = run(tmp_path)
    assert "79 passed" in output
    assert "sample:" not in output


def test_a_rotation_thins_out_what_is_marked_and_nothing_else(tmp_path: Path) -> None:
    output = run(tmp_path, "--rotate", "abc")
    # three of six; of two times three, three that have both tests and each value
    assert "sample: 6 of 12 tests, seed abc, 11 of 11 values covered" in output
    assert f"{67 + 6} passed" in output
    assert "left out: test_suite.py::test_of_one_property[" in output
    assert "test_many" not in output
    assert "passed" not in run(tmp_path, "--rotate", "abc", "--sample", "5", "--sample-seed", "abc")


@pytest.mark.parametrize("size", [0, 5, 50])
def test_no_tests_no_sample(size: int) -> None:
    assert draw([], size, "s").chosen == ()
