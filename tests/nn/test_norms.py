"""The three norms: hand-computed values, the place of eps, and where each casts."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.nn.norms import gated_rms_norm, layer_norm, normalize, rms_norm


def test_rms_norm_divides_by_the_root_mean_square():
    x = jnp.array([3.0, 4.0])
    expected = np.array([3.0, 4.0]) / np.sqrt(12.5) * [2.0, 10.0]
    np.testing.assert_allclose(rms_norm(x, jnp.array([2.0, 10.0]), 0.0), expected, rtol=1e-15)


def test_rms_norm_adds_eps_to_the_mean_square_inside_the_root():
    x = jnp.full(8, 1e-3)
    np.testing.assert_allclose(normalize(x, 1e-5), 1e-3 / np.sqrt(1e-6 + 1e-5), rtol=1e-14)


def test_rms_norm_of_zeros_is_zero():
    assert not np.any(rms_norm(jnp.zeros(4), jnp.ones(4), 1e-5))


def test_rms_norm_is_cast_before_the_weight_multiplies():
    x = jnp.array([1.0, 1.28, -0.62, 1.1], jnp.bfloat16)
    weight = jnp.array([1.0078125, 1.3046875, 0.8984375, 1.0546875], jnp.bfloat16)
    once = (normalize(x, 1e-5) * weight.astype(jnp.float32)).astype(jnp.bfloat16)
    twice = normalize(x, 1e-5).astype(jnp.bfloat16) * weight
    assert np.any(once != twice)  # these values tell the two apart
    np.testing.assert_array_equal(rms_norm(x, weight, 1e-5), twice)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_norms_keep_the_dtype_of_their_input(weight_dtype):
    x, weight = jnp.ones(4, jnp.bfloat16), jnp.ones(4, weight_dtype)
    assert rms_norm(x, weight, 1e-5).dtype == jnp.bfloat16
    assert layer_norm(x, weight, weight).dtype == jnp.bfloat16
    assert gated_rms_norm(x, x, weight, 1e-5).dtype == jnp.bfloat16
    assert normalize(x, 1e-5).dtype == jnp.float32
    assert normalize(x.astype(jnp.float64), 1e-5).dtype == jnp.float64


def test_output_gate_is_a_sigmoid():
    x, weight = jnp.array([3.0, -4.0]), jnp.array([2.0, 0.5])
    ungated = np.array([3.0, -4.0]) / np.sqrt(12.5 + 1e-5) * [2.0, 0.5]
    half_open = gated_rms_norm(x, jnp.zeros(2), weight, 1e-5)
    np.testing.assert_allclose(half_open, ungated / 2, rtol=1e-14)
    closed = gated_rms_norm(x, jnp.full(2, -20.0), weight, 1e-5)
    np.testing.assert_allclose(closed, ungated / (1 + np.exp(20)), rtol=1e-13)
    # SiLU would give 20 times the value.
    open_gate = gated_rms_norm(x, jnp.full(2, 20.0), weight, 1e-5)
    np.testing.assert_allclose(open_gate, ungated, rtol=1e-8)


def test_output_norm_multiplies_weight_and_gate_in_float32_and_casts_once():
    rng = np.random.default_rng(0)
    x, gate = (jnp.asarray(rng.standard_normal((50, 16)), jnp.bfloat16) for _ in range(2))
    weight = jnp.asarray(1 + 0.25 * rng.standard_normal(16), jnp.bfloat16)
    wide = [a.astype(jnp.float32) for a in (x, gate, weight)]
    expected = gated_rms_norm(*wide, 1e-5).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gated_rms_norm(x, gate, weight, 1e-5), expected)


def test_layer_norm_of_a_constant_is_its_bias():
    bias = jnp.array([0.3, -0.7, 1.1, 0.0])
    np.testing.assert_array_equal(layer_norm(jnp.full(4, 5.0), jnp.full(4, 3.0), bias), bias)


def test_layer_norm_by_hand():
    x = jnp.array([1.0, 2.0, 6.0, 7.0])  # mean 4, variance 6.5
    weight, bias = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([0.5, 0.0, -0.5, 1.0])
    expected = np.array([-3, -2, 2, 3]) / np.sqrt(6.5 + 1e-6) * weight + bias
    np.testing.assert_allclose(layer_norm(x, weight, bias), expected, rtol=1e-14)


def test_layer_norm_eps_is_1e_6():
    x = jnp.array([1e-3, -1e-3])  # variance 1e-6: an eps of 1e-5 would give 0.30
    expected = np.array([1, -1]) / np.sqrt(2)
    np.testing.assert_allclose(layer_norm(x, jnp.ones(2), jnp.zeros(2)), expected, rtol=1e-12)


def test_layer_norm_with_float32_parameters_and_bfloat16_input_is_near_the_float32_one():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((20, 22)), jnp.bfloat16)
    weight, bias = (jnp.asarray(rng.standard_normal(22), jnp.float32) for _ in range(2))
    expected = layer_norm(x.astype(jnp.float32), weight, bias)
    # Half a unit in the last place of bfloat16: one rounding, at the end.
    np.testing.assert_allclose(
        layer_norm(x, weight, bias).astype(jnp.float32), expected, rtol=2**-8, atol=1e-30
    )
