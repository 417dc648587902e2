import numpy as np
import pytest

from planner.errors import InputError
from planner.model.traffic import Lengths, TruncatedLogNormal


def law(max_tokens: float = 131_072) -> TruncatedLogNormal:
    return TruncatedLogNormal(mu=9.90, sigma=1.00, min_tokens=128, max_tokens=max_tokens)


@pytest.mark.parametrize(("max_tokens", "mean", "p"), [(131_072, 27_485.7, 0.495723), (128_000, 27_312.7, 0.494869)])
def test_closed_form_of_the_case_study(max_tokens, mean, p):
    whole = law(max_tokens).means_between(np.array([128.0, max_tokens]))
    assert float(whole[0]) == pytest.approx(mean, rel=1e-4)
    assert law(max_tokens).lengths().share_above(19_400.0) == pytest.approx(p, rel=1e-4)


def test_conditional_means_of_the_case_study():
    found, p = law(), 0.495723
    short, long = found.means_between(np.array([128.0, 19_400.0, 131_072.0]))
    assert found.quantile(np.array([0.9])) == pytest.approx([62_410.1], rel=1e-4)
    assert long / p == pytest.approx(45_045.6, rel=1e-4)
    assert short / (1 - p) == pytest.approx(10_223.6, rel=1e-4)


def test_lengths_stay_inside_their_law():
    lengths = law().lengths(1000).tokens
    assert 128 <= lengths[0] < lengths[-1] <= 131_072
    assert list(law().quantile(np.array([0.0, 1.0]))) == pytest.approx([128, 131_072])


def test_bins_keep_the_mean_exactly():
    for bins in (10, 1000, 200_000):
        assert law().lengths(bins).mean == pytest.approx(27_485.684, rel=1e-6)


def test_samples_are_sorted_and_counted():
    found = Lengths.of(np.array([5.0, 3.0, 5.0, 1.0]))
    assert (list(found.tokens), list(found.weights)) == ([1, 3, 5], [0.25, 0.25, 0.5])
    assert [found.share_above(t) for t in (0, 3, 5)] == [1.0, 0.5, 0.0]
    assert [found.quantile(q) for q in (0.25, 0.5, 0.9)] == [1, 3, 5]


@pytest.mark.parametrize("samples", [[], [-1.0], [float("nan")]])
def test_lengths_that_are_none_are_refused(samples):
    with pytest.raises(InputError):
        Lengths.of(np.array(samples))


def test_thinning_keeps_mean_and_weight():
    rng = np.random.default_rng(0)
    found = Lengths.of(rng.lognormal(9, 1, 5000))
    thin = found.thinned(100)
    assert len(thin.tokens) <= 100
    assert thin.mean == pytest.approx(found.mean)
    assert thin.weights.sum() == pytest.approx(1.0)
    assert (np.diff(thin.tokens) > 0).all()


def test_drawn_lengths_follow_the_weights():
    found = Lengths.of(np.array([1.0, 2.0, 2.0, 2.0]))
    drawn = found.sample(4000, np.random.default_rng(1))
    assert (drawn == 2).mean() == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("change", [{"sigma": 0.0}, {"min_tokens": 0.0}, {"max_tokens": 100.0}])
def test_a_law_that_is_none_is_refused(change):
    with pytest.raises(InputError):
        TruncatedLogNormal(**({"mu": 9.9, "sigma": 1.0, "min_tokens": 128, "max_tokens": 131_072} | change))
