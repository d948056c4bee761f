"""Hyper-connections: the coefficients of a site, Sinkhorn's order, and which way comb mixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.nn import mhc
from glm5_jax.nn.mhc import collapse, expand, mean_streams

# Compiled whole: cheaper than one compilation for each of their operations.
coefficients = jax.jit(mhc.coefficients, static_argnames="iterations")
sinkhorn = jax.jit(mhc.sinkhorn, static_argnums=1)


def site(streams, fn, base, scale, norm_eps=1e-5, hc_eps=1e-6, iterations=20):
    arrays = [jnp.asarray(a) for a in (streams, fn, base, scale)]
    return coefficients(*arrays, norm_eps=norm_eps, hc_eps=hc_eps, iterations=iterations)


def reference_sinkhorn(logits, iterations, eps):
    comb = np.exp(logits - logits.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return comb


def reference_site(streams, fn, base, scale, norm_eps, hc_eps, iterations):
    M = streams.shape[-2]
    flat = streams.reshape(*streams.shape[:-2], -1)
    flat = flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + norm_eps)
    logits = flat @ fn.T
    pre = logits[..., :M] * scale[0] + base[:M]
    post = logits[..., M : 2 * M] * scale[1] + base[M : 2 * M]
    comb = logits[..., 2 * M :] * scale[2] + base[2 * M :]
    return (
        1 / (1 + np.exp(-pre)) + hc_eps,
        2 / (1 + np.exp(-post)),
        reference_sinkhorn(comb.reshape(*comb.shape[:-1], M, M), iterations, hc_eps),
    )


def test_one_iteration_scales_the_columns_only():
    comb = np.asarray(sinkhorn(jnp.array([[2.0, 0.0], [1.0, 0.0]]), 1, 1e-6))
    rows = np.array([[np.e**2, 1], [np.e, 1]]) / [[1 + np.e**2], [1 + np.e]]
    np.testing.assert_allclose(comb, rows / rows.sum(0), atol=4e-6)
    assert np.abs(comb.sum(1) - 1).max() > 0.05


def test_two_iterations_by_hand_with_eps_after_the_softmax_and_in_every_divisor():
    # Softmax of equal logits is 1/2 each, + 1 makes 3/2; columns: 3/2 / (3 + 1) = 3/8;
    # rows: 3/8 / (3/4 + 1) = 3/14; columns: 3/14 / (3/7 + 1) = 3/20.
    np.testing.assert_allclose(sinkhorn(jnp.zeros((2, 2)), 2, 1.0), 3 / 20, rtol=1e-15)


@pytest.mark.parametrize("iterations", [1, 2, 3, 20])
def test_sinkhorn_runs_columns_then_rows_and_columns(iterations):
    logits = np.random.default_rng(0).normal(0, 2, (5, 4, 4))
    expected = reference_sinkhorn(logits, iterations, 1e-2)
    np.testing.assert_allclose(
        sinkhorn(jnp.asarray(logits), iterations, 1e-2), expected, rtol=1e-13
    )


@given(
    st.lists(st.floats(-50, 50), min_size=9, max_size=9),
    st.sampled_from([jnp.float32, jnp.float64]),
)
@settings(max_examples=40, deadline=None)
def test_sinkhorn_is_finite_and_its_columns_sum_to_one(logits, dtype):
    comb = np.asarray(sinkhorn(jnp.asarray(logits, dtype).reshape(3, 3), 20, 1e-6))
    assert comb.dtype == dtype
    assert np.all(comb > 0)
    np.testing.assert_allclose(comb.sum(0), 1, atol=4e-6)


def test_mild_logits_give_a_doubly_stochastic_matrix():
    comb = np.asarray(sinkhorn(jnp.array([[1.0, 0, -1], [0, 2, 0], [0, 0.5, 1]]), 20, 1e-6))
    np.testing.assert_allclose(comb.sum(0), 1, atol=4e-6)
    np.testing.assert_allclose(comb.sum(1), 1, atol=4e-6)


@pytest.mark.parametrize("name", ["attn_hc", "ffn_hc"])
def test_site_equals_the_reference(small, call, name):
    streams = np.random.default_rng(0).standard_normal((2, 5, 3, 24))
    p, c = small.below(f"layers.1.{name}"), small.config
    expected = reference_site(
        streams, p["fn"], p["base"], p["scale"], c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters
    )
    actual = call(getattr(small.model.layers[1], name), streams)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_saturated_logits_leave_eps_in_pre_and_nothing_in_post():
    base = np.full(8, -100.0)
    got = site(np.ones((1, 1, 2, 3)), np.zeros((8, 6)), base, np.ones(3))
    np.testing.assert_allclose(got.pre, 1e-6, rtol=1e-12)
    np.testing.assert_allclose(got.post, 0, atol=1e-40)


def test_post_reaches_two_and_pre_one_plus_eps():
    base = np.full(8, 100.0)
    got = site(np.ones((1, 1, 2, 3)), np.zeros((8, 6)), base, np.ones(3))
    np.testing.assert_allclose(got.pre, 1 + 1e-6, rtol=1e-12)
    np.testing.assert_allclose(got.post, 2, rtol=1e-12)


def test_streams_are_normalised_with_the_norms_eps_and_not_with_hc_eps():
    streams, fn = np.full((1, 1, 2, 3), 1e-3), np.zeros((8, 6))
    fn[0, 0] = 1.0
    got = site(streams, fn, np.zeros(8), np.ones(3), norm_eps=1e-5, hc_eps=0.25)
    logit = 1e-3 / np.sqrt(1e-6 + 1e-5)
    np.testing.assert_allclose(got.pre[0, 0], [1 / (1 + np.exp(-logit)) + 0.25, 0.75], rtol=1e-13)


def test_each_part_has_its_own_scale():
    streams, fn = np.ones((1, 1, 2, 3)), np.zeros((8, 6))
    fn[:, 0] = np.sqrt(1 + 1e-5)  # every logit is 1
    got = site(streams, fn, np.zeros(8), np.array([0.5, -1.0, 0.0]), hc_eps=0.0)
    np.testing.assert_allclose(got.pre, 1 / (1 + np.exp(-0.5)), rtol=1e-13)
    np.testing.assert_allclose(got.post, 2 / (1 + np.exp(1.0)), rtol=1e-13)
    np.testing.assert_allclose(got.comb, 0.5, rtol=1e-13)


def test_projection_of_one_stream_and_channel_responds_only_to_it():
    M, X = 3, 5
    fn = np.zeros(((2 + M) * M, M * X))
    fn[4, 2 * X + 1] = 1.0  # the post logit of stream 1, from channel 1 of stream 2
    # Signs change no norm: only the coefficient that reads the flipped element can move.
    plus = np.ones((1, M * X, M, X))
    minus = plus.copy()
    minus.reshape(M * X, M * X)[np.arange(M * X), np.arange(M * X)] = -1
    got = [site(h, fn, np.zeros(15), np.ones(3)) for h in (plus, minus)]
    np.testing.assert_array_equal(got[0].pre, got[1].pre)
    np.testing.assert_array_equal(got[0].comb, got[1].comb)
    moved = np.argwhere(np.asarray(got[0].post != got[1].post)[0])
    np.testing.assert_array_equal(moved, [[2 * X + 1, 1]])


def test_comb_logits_are_row_major():
    base = np.zeros(15)
    base[6 + 1] = 50.0  # comb[0, 1]
    got = site(np.ones((1, 1, 3, 5)), np.zeros((15, 15)), base, np.ones(3), iterations=1)
    comb = np.asarray(got.comb)[0, 0]
    assert comb[0, 1] == comb.max()
    # After one column scaling, row 0 holds all of column 1 that the softmax left to share.
    np.testing.assert_allclose(comb[:, 1], np.array([1, 1 / 3, 1 / 3]) / (5 / 3), rtol=1e-5)


def test_cyclic_comb_moves_each_stream_to_the_next():
    streams = jnp.arange(1.0, 5.0).reshape(1, 1, 4, 1) * jnp.ones(3)
    cycle = np.zeros((1, 1, 4, 4))
    for i in range(4):
        cycle[0, 0, i, (i + 1) % 4] = 1.0  # comb[i, j]: from stream i to stream j
    out = expand(jnp.zeros((1, 1, 3)), streams, jnp.zeros((1, 1, 4)), jnp.asarray(cycle))
    np.testing.assert_array_equal(out[0, 0, :, 0], [4.0, 1.0, 2.0, 3.0])


def test_saturated_base_cycles_the_streams():
    base = np.full(24, -50.0)
    base[8:].reshape(4, 4)[np.arange(4), (np.arange(4) + 1) % 4] = 50.0
    streams = np.arange(1.0, 5.0).reshape(1, 1, 4, 1) * np.ones(3)
    got = site(streams, np.zeros((24, 12)), base, np.ones(3))
    out = expand(jnp.zeros((1, 1, 3)), jnp.asarray(streams), got.post, got.comb)
    np.testing.assert_allclose(out[0, 0, :, 0], [4.0, 1.0, 2.0, 3.0], rtol=1e-4)


def test_expand_adds_the_output_to_every_stream_by_its_post():
    streams, y = jnp.ones((1, 1, 2, 3)), jnp.array([[[1.0, 10.0, 100.0]]])
    post, comb = jnp.array([[[0.5, 2.0]]]), jnp.array([[[[0.25, 0.75], [0.5, 0.125]]]])
    out = expand(y, streams, post, comb)
    np.testing.assert_allclose(out[0, 0, 0], [1.25, 5.75, 50.75])
    np.testing.assert_allclose(out[0, 0, 1], [2.875, 20.875, 200.875])


def test_collapse_is_the_weighted_sum_of_the_streams():
    streams = jnp.array([[[[1.0, 2.0], [10.0, 20.0]]]])
    np.testing.assert_allclose(collapse(streams, jnp.array([[[3.0, 0.5]]])), [[[8.0, 16.0]]])


def test_collapse_of_bfloat16_streams_sums_in_float32():
    # In bfloat16 256 + 1 is 256: a sum rounded on the way would never reach 258.
    streams = jnp.array([256.0, 1.0, 1.0], jnp.bfloat16).reshape(1, 1, 3, 1)
    out = collapse(streams, jnp.ones((1, 1, 3), jnp.float32))
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 0, 0]) == 258.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_last_collapse_is_a_mean_without_weights(dtype):
    streams = jnp.array([256.0, 1.0, 1.0, 6.0], dtype).reshape(1, 1, 4, 1)
    out = mean_streams(streams)
    assert out.dtype == dtype
    assert float(out[0, 0, 0]) == 66.0  # 256 + 1 + 1 is 256 in bfloat16


def test_expand_casts_its_coefficients_to_the_streams_dtype_and_mixes_in_float32():
    streams = jnp.array([256.0, 1.0, 1.0], jnp.bfloat16).reshape(1, 1, 3, 1)
    y = jnp.ones((1, 1, 1), jnp.bfloat16)
    # 1 + 2^-9 is no bfloat16: cast, it is 1, and 256 · 1 + 1 + 1 = 258.
    comb = jnp.full((1, 1, 3, 3), 1 + 2.0**-9, jnp.float32)
    post = jnp.full((1, 1, 3), 2.0 + 2.0**-8, jnp.float32)
    out = expand(y, streams, post, comb)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 260.0)


@pytest.mark.parametrize(
    ("streams", "expected"),
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)],
)
def test_coefficients_are_float32_or_wider(streams, expected):
    arrays = [jnp.zeros((1, 1, 2, 3), streams), jnp.zeros((8, 6), streams)]
    got = jax.eval_shape(
        lambda *a: mhc.coefficients(*a, norm_eps=1e-5, hc_eps=1e-6, iterations=2),
        *arrays,
        jnp.zeros(8, jnp.float32),
        jnp.zeros(3, jnp.float32),
    )
    assert {value.dtype for value in got} == {jnp.dtype(expected)}
