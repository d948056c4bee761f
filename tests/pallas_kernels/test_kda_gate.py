"""The gate and the normalisation, which every implementation shares."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from pallas_kernels.kda import kda_gate, l2_normalize

# The gate.


def gate(x, A_log, lower_bound, dtype=jnp.float32):
    return kda_gate(
        jnp.full((1, 1), x, dtype), jnp.full(1, A_log, dtype), jnp.zeros(1, dtype), lower_bound
    ).item()


def test_gate_is_a_scale_on_a_sigmoid_and_not_a_clamp(float64):
    assert gate(0.0, 0.0, -5.0) == -2.5
    assert gate(1.0, math.log(2), -5.0) == pytest.approx(-5 / (1 + math.exp(-2)), rel=1e-7)
    assert gate(1.0, math.log(2), -5.0) == pytest.approx(-4.4040, abs=1e-4)


def test_gate_saturates_at_its_bound_and_at_zero(float32):
    assert gate(1e4, 0.0, -5.0) == -5
    assert gate(-1e4, 0.0, -5.0) == 0


def test_gate_without_bound_is_the_softplus_form(float64):
    for x, A_log in [(0.0, 0.0), (1.5, 0.3), (-7.0, -2.0), (-60.0, 50.0), (100.0, 1.0)]:
        expected = -math.exp(A_log) * math.log1p(math.exp(x))
        assert gate(x, A_log, None, jnp.float64) == pytest.approx(expected, rel=1e-13)


def test_gate_of_a_huge_rate_and_a_vanishing_softplus_is_not_nan(float32):
    # exp(100) overflows float32, softplus(−200) underflows it; the product exp(−100) is zero in it.
    assert gate(-200.0, 100.0, None) == pytest.approx(0, abs=1e-37)
    assert gate(-110.0, 100.0, None) == pytest.approx(-math.exp(-10), rel=1e-4)


def test_gate_bias_is_per_head_and_channel(float64):
    f, bias = jnp.zeros((3, 2, 4)), jnp.arange(8.0)
    g = kda_gate(f, jnp.zeros(2), bias, -5.0)
    assert_allclose(g[1], -5 / (1 + np.exp(-np.arange(8.0))).reshape(2, 4), rtol=1e-13)
    assert_array_equal(g, kda_gate(f, jnp.zeros(2), bias.reshape(2, 4), -5.0))


finite = st.floats(-1e4, 1e4, width=32)
gate_and_gradients = jax.jit(
    jax.value_and_grad(lambda x, lower_bound: jnp.sum(kda_gate(*x, lower_bound)), argnums=0),
    static_argnums=1,
)


@settings(deadline=None, max_examples=200)
@given(f=finite, bias=finite, A_log=st.floats(-100, 100, width=32))
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gate_and_its_gradients_are_finite(lower_bound, f, bias, A_log):
    arguments = [jnp.full((1, 1), f, jnp.float32)]
    arguments += [jnp.full(1, x, jnp.float32) for x in (A_log, bias)]
    g, gradient = gate_and_gradients(arguments, lower_bound)
    assert (-5 <= g <= 0) if lower_bound else (-math.inf < g <= 0)
    assert all(np.isfinite(x).all() for x in gradient)


def test_gate_computes_bfloat16_in_float32(float32):
    f = jnp.full((1, 1), 0.3, jnp.bfloat16)
    g = kda_gate(f, jnp.zeros(1), jnp.zeros(1), -5.0)
    assert g.dtype == jnp.float32
    assert_array_equal(g, kda_gate(f.astype(jnp.float32), jnp.zeros(1), jnp.zeros(1), -5.0))


def test_gate_refuses_a_bound_that_is_not_negative():
    with pytest.raises(ValueError, match="must be negative or None, got 5"):
        gate(0.0, 0.0, 5.0)


def test_gate_refuses_parameters_of_other_heads():
    with pytest.raises(ValueError, match=r"got f \(3, 2, 4\), A_log \(4,\), dt_bias \(8,\)"):
        kda_gate(jnp.zeros((3, 2, 4)), jnp.zeros(4), jnp.zeros(8), -5.0)


# The normalisation.


def test_normalisation_adds_its_epsilon_to_the_sum_of_squares(float64):
    # Not a floor under the norm (that gives 1), not under the mean square.
    x = 1e-3 * jnp.eye(1, 4)
    assert_allclose(l2_normalize(x)[0, 0], 1e-3 / math.sqrt(2e-6), rtol=1e-13)


def test_normalisation_of_zero_is_zero_with_a_finite_gradient(float32):
    x = jnp.zeros((2, 4))
    assert_array_equal(l2_normalize(x), x)
    assert_allclose(jax.grad(lambda x: l2_normalize(x).sum())(x), np.full((2, 4), 1e3), rtol=1e-5)


def test_normalisation_widens_bfloat16(float32):
    x = jnp.asarray([[0.3, 0.7]], jnp.bfloat16)
    assert_array_equal(l2_normalize(x), l2_normalize(x.astype(jnp.float32)))
    assert l2_normalize(x).dtype == jnp.float32
