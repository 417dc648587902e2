import numpy as np
import pytest

from planner.model.normal import normal_cdf, normal_quantile


def test_tabled_values():
    assert normal_cdf(np.array([0.0, 1.959963984540054, -3.0])) == pytest.approx([0.5, 0.975, 1.3498980316300946e-3])
    assert normal_quantile(np.array([0.5, 0.975])) == pytest.approx([0.0, 1.959963984540054])


def test_the_quantile_is_the_inverse_far_into_the_tails():
    z = np.linspace(-7, 7, 57)
    assert normal_quantile(normal_cdf(z)) == pytest.approx(z, abs=1e-3)
    low = z[z < 0]
    assert normal_quantile(normal_cdf(low)) == pytest.approx(low, rel=1e-12)
