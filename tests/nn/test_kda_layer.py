"""The KDA mixer around the recurrence: convolution, gates, padding, and a float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.nn.kda import causal_conv, input_gate


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference_kda(p, x, mask, *, heads, lower_bound, eps):
    """One row, token by token: x [T, X], mask [T] contiguous."""
    out = np.zeros_like(x)
    x = x[mask]
    T = len(x)
    qkv = np.concatenate([x @ p[f"{n}_proj"].T for n in "qkv"], axis=1)
    K = p["conv"].shape[1]
    past = np.concatenate([np.zeros((K - 1, qkv.shape[1])), qkv])
    conv = np.array([sum(p["conv"][:, i] * past[t + i] for i in range(K)) for t in range(T)])
    q, k, v = np.split((conv * sigmoid(conv)).reshape(T, 3 * heads, -1), 3, axis=1)
    D = q.shape[-1]
    q, k = (h / np.sqrt((h**2).sum(-1, keepdims=True) + 1e-6) for h in (q, k))
    f = (x @ p["f_a_proj"].T @ p["f_b_proj"].T + p["dt_bias"].reshape(-1)).reshape(T, heads, D)
    scale = np.exp(p["A_log"].reshape(-1))[:, None]
    if lower_bound is None:
        g = -scale * np.log1p(np.exp(f))
    else:
        g = lower_bound * sigmoid(scale * f)
    beta = sigmoid(x @ p["b_proj"].T)
    gate = sigmoid(x @ p["g_a_proj"].T @ p["g_b_proj"].T).reshape(T, heads, D)
    y = np.zeros((T, heads, D))
    for h in range(heads):
        S = np.zeros((D, D))
        for t in range(T):
            S = np.exp(g[t, h])[:, None] * S
            S = S + np.outer(k[t, h], beta[t, h] * (v[t, h] - S.T @ k[t, h]))
            o = S.T @ q[t, h] * D**-0.5
            y[t, h] = o / np.sqrt(np.mean(o**2) + eps) * p["o_norm"] * gate[t, h]
    out[mask] = y.reshape(T, -1) @ p["o_proj"].T
    return out


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_layer_equals_the_reference(build, call, hidden, mask, lower_bound):
    heads = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
    linear = {**heads, "gate_lower_bound": lower_bound, "safe_gate": lower_bound is not None}
    small = build(linear_attn_config=linear)
    assert small.config.linear_lower_bound == lower_bound
    p = small.below("layers.0.attn")
    actual = call(small.model.layers[0].attn, hidden, mask)
    for row in range(3):
        expected = reference_kda(
            p,
            hidden[row],
            mask[row],
            heads=4,
            lower_bound=lower_bound,
            eps=small.config.rms_norm_eps,
        )
        np.testing.assert_allclose(actual[row][mask[row]], expected[mask[row]], atol=1e-12)


def test_last_tap_touches_the_current_token():
    x = jnp.asarray([[[1.0], [10.0], [100.0]]])
    out = causal_conv(x, jnp.asarray([[0.0, 0.5, 2.0]]))
    sums = np.array([2.0, 20.5, 205.0])
    np.testing.assert_allclose(out[0, :, 0], sums * sigmoid(sums), rtol=1e-14)


def test_each_channel_has_its_own_taps():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 3)))
    weight = jnp.asarray([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    out = np.asarray(causal_conv(x, weight))[0]
    x = np.asarray(x)[0]
    np.testing.assert_allclose(out[:, 0], (x * sigmoid(x))[:, 0], rtol=1e-14)
    np.testing.assert_allclose(out[1:, 1], (x * sigmoid(x))[:-1, 1], rtol=1e-14)
    assert not np.any(out[:, 2])


def test_convolution_of_a_sequence_shorter_than_its_taps():
    out = causal_conv(jnp.ones((1, 2, 1)), jnp.asarray([[8.0, 4.0, 2.0, 1.0]]))
    sums = np.array([1.0, 3.0])
    np.testing.assert_allclose(out[0, :, 0], sums * sigmoid(sums), rtol=1e-14)


def test_bfloat16_convolution_sums_in_float32():
    x = jnp.asarray([[[256.0], [1.0], [1.0]]], jnp.bfloat16)
    out = causal_conv(x, jnp.ones((1, 3), jnp.float32))
    assert out.dtype == jnp.bfloat16
    assert float(out[0, 2, 0]) == 258.0  # SiLU of so much changes nothing


def test_convolution_channels_are_query_key_value(small, hidden, mask):
    conv = np.zeros_like(small.arrays["layers.0.attn.conv"])
    conv.reshape(3, -1, 4)[:, :, 3] = [[1.0], [2.0], [3.0]]
    attn = small.with_arrays({"layers.0.attn.conv": conv}).layers[0].attn

    @jax.jit
    def convolved(attn, x, mask):
        sites = {}
        attn(x, mask, sites.__setitem__)
        return {name: sites[name] for name in "qkv"}

    sites = convolved(attn, hidden[:1], mask[:1])
    for tap, name in zip((1.0, 2.0, 3.0), "qkv", strict=True):
        projected = tap * (hidden[:1] @ small.arrays[f"layers.0.attn.{name}_proj"].T)
        expected = (projected * sigmoid(projected)).reshape(sites[name].shape)
        np.testing.assert_allclose(sites[name], expected, atol=1e-13)


def test_write_strength_is_float32_from_the_projection_on():
    logits = jnp.asarray([[[0.3, -2.0]]], jnp.bfloat16)
    beta = input_gate(logits)
    assert beta.dtype == jnp.float32
    np.testing.assert_allclose(beta, sigmoid(np.asarray(logits, np.float32)), rtol=1e-6)


@pytest.mark.parametrize("where", ["left", "right"])
def test_padding_may_hold_anything(small, call, hidden, mask, where):
    expected = call(small.model.layers[0].attn, hidden, mask)
    poisoned = hidden.copy()
    row = 1 if where == "left" else 2
    poisoned[row][~mask[row]] = np.nan
    actual = call(small.model.layers[0].attn, poisoned, mask)
    np.testing.assert_array_equal(actual[mask], expected[mask])
    assert np.all(np.isfinite(actual))


def test_tokens_do_not_see_the_future(small, call, hidden, mask):
    changed = hidden.copy()
    changed[:, 15:] += 1.0
    before = call(small.model.layers[0].attn, hidden, mask)
    after = call(small.model.layers[0].attn, changed, mask)
    np.testing.assert_array_equal(before[:, :15], after[:, :15])
    assert np.all(np.any(before[:, 15:20] != after[:, 15:20], axis=-1))


def test_bfloat16_layer_stays_bfloat16_and_near_float64(build, call, hidden, mask):
    x = hidden.astype(jnp.bfloat16)
    expected = call(build().model.layers[0].attn, x.astype(np.float64), mask)[mask]
    actual = call(build("bfloat16").model.layers[0].attn, x, mask)
    assert actual.dtype == jnp.bfloat16
    error = np.linalg.norm(actual[mask].astype(np.float64) - expected)
    assert error < 2e-2 * np.linalg.norm(expected)
