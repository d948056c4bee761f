"""Products with weights `[out, in]`: one form whatever the rows and the size of the weight."""

import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize("rows", [1, 3])
def test_bfloat16_products_are_summed_in_float32_and_rounded_once(rows):
    rng = np.random.default_rng(1)
    x, weight = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((rows, 512), (64, 512))
    )
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got = linear(x, weight)
    assert got.dtype == jnp.bfloat16
    # Half a unit in the last of 8 bits; sums in bfloat16 would be off by several.
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2.0**-8, atol=1e-4)
