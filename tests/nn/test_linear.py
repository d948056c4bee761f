"""Products with weights `[out, in]`: one form whatever the rows and the size of the weight."""

import jax
import numpy as np
import pytest

from glm5_jax.nn import linear as linear_file
from glm5_jax.nn.linear import linear


@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (2, 3)])
@pytest.mark.parametrize("outputs", [6, 7])
@pytest.mark.parametrize("large", [False, True])
def test_rows_of_any_number_are_multiplied_by_the_transposed_weight(
    rows, outputs, large, monkeypatch
):
    monkeypatch.setattr(linear_file, "_LARGE", 1 if large else 100)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((*rows, 5)), rng.standard_normal((outputs, 5))
    np.testing.assert_allclose(linear(x, weight), x @ weight.T, atol=1e-14)
    seed = rng.standard_normal((*rows, outputs))
    by_x, by_weight = jax.vjp(linear, x, weight)[1](seed)
    np.testing.assert_allclose(by_x, seed @ weight, atol=1e-14)
    expected = seed.reshape(-1, outputs).T @ x.reshape(-1, 5)
    np.testing.assert_allclose(by_weight, expected, atol=1e-14)
