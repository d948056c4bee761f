"""The absorbed products against their formulas: in float64, with all sizes different."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.nn.absorbed import absorb_o, absorb_q, fold_index_scale, split_kv_b, widen_ape
from glm5_jax.nn.dsa import masked_attention
from glm5_jax.nn.indexer import Span, head_weights, index_scores, pool_keys
from pallas_kernels.sparse_mla import sparse_mla_decode

A, N, V, R, RQ, X, T = 3, 16, 12, 24, 10, 14, 9


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def kv_b(rng):
    return jnp.asarray(rng.standard_normal((A * (N + V), R)))


def test_keys_stand_before_values_in_every_head(kv_b):
    w_k, w_v = split_kv_b(kv_b, A, N)
    for head in range(A):
        rows = np.asarray(kv_b)[head * (N + V) : (head + 1) * (N + V)]
        np.testing.assert_array_equal(w_k[head], rows[:N])
        np.testing.assert_array_equal(w_v[head], rows[N:])


def test_absorbed_query_is_each_heads_query_through_its_own_keys(rng, kv_b):
    q_b, qr = rng.standard_normal((A * N, RQ)), rng.standard_normal(RQ)
    w_k, _ = split_kv_b(kv_b, A, N)
    absorbed = absorb_q(jnp.asarray(q_b), w_k)
    assert absorbed.shape == (A, R, RQ)
    for head in range(A):
        q = q_b[head * N : (head + 1) * N] @ qr
        np.testing.assert_allclose(absorbed[head] @ qr, np.asarray(w_k[head]).T @ q, atol=1e-12)


def test_absorbed_output_is_each_heads_value_through_its_own_columns(rng, kv_b):
    o_proj, latents = rng.standard_normal((X, A * V)), rng.standard_normal((A, R))
    _, w_v = split_kv_b(kv_b, A, N)
    absorbed = absorb_o(jnp.asarray(o_proj), w_v)
    assert absorbed.shape == (X, A, R)
    values = [np.asarray(w_v[head]) @ latents[head] for head in range(A)]
    expected = o_proj @ np.concatenate(values)
    np.testing.assert_allclose(np.einsum("xar,ar->x", absorbed, latents), expected, atol=1e-12)


def test_attention_in_the_latents_space_is_that_over_keys_and_values(rng, kv_b):
    """Through both products, with the scale of a query head and not of the latent."""
    q_b, o_proj = rng.standard_normal((A * N, RQ)), rng.standard_normal((X, A * V))
    qr, latent = rng.standard_normal((1, T, RQ)), rng.standard_normal((1, T, R))
    causal = np.tril(np.ones((1, T, T), bool))
    w_k, w_v = split_kv_b(kv_b, A, N)
    kv = (latent @ np.asarray(kv_b).T).reshape(1, T, A, N + V)
    q = jnp.asarray((qr @ q_b.T).reshape(1, T, A, N))
    o = masked_attention(q, jnp.asarray(kv[..., :N]), jnp.asarray(kv[..., N:]), jnp.asarray(causal))
    expected = np.asarray(o).reshape(1, T, A * V) @ o_proj.T

    q = jnp.einsum("arq,btq->btar", absorb_q(jnp.asarray(q_b), w_k), qr)
    seen = jnp.where(causal, jnp.arange(T), -1)
    o = sparse_mla_decode(q, jnp.asarray(latent), seen, scale=N**-0.5)
    actual = jnp.einsum("xar,btar->btx", absorb_o(jnp.asarray(o_proj), w_v), o)
    np.testing.assert_allclose(actual, expected, atol=1e-11)


def test_folded_index_scale_gives_the_scores_of_both_scales(rng):
    HI, DI = 12, 5
    queries, keys = rng.standard_normal((1, T, HI, DI)), rng.standard_normal((1, 7, DI))
    x, weights_proj = rng.standard_normal((1, T, X)), rng.standard_normal((HI, X))
    weights = head_weights(jnp.asarray(x @ weights_proj.T))
    expected = index_scores(jnp.asarray(queries), jnp.asarray(keys), weights)

    folded = np.asarray(fold_index_scale(jnp.asarray(weights_proj), DI))
    np.testing.assert_allclose(folded, weights_proj * DI**-0.5 * HI**-0.5, rtol=1e-14)
    dots = np.maximum(np.einsum("bthd,bpd->bthp", queries, keys), 0)
    scores = np.einsum("bth,bthp->btp", x @ folded.T, dots)
    np.testing.assert_allclose(scores, expected, atol=1e-12)


def test_folded_index_scale_is_float32_in_every_model():
    assert fold_index_scale(jnp.ones((12, 4), jnp.bfloat16), 128).dtype == jnp.float32


def test_widened_ape_is_the_bias_of_every_token(rng):
    P, DI, pools = 4, 5, 3
    keys, gates = rng.standard_normal((2, 1, P * pools, DI))
    ape = jnp.asarray(rng.standard_normal((P, DI)))
    span = Span(jnp.zeros(1, int), jnp.full(1, P * pools))
    expected = pool_keys(jnp.asarray(keys), jnp.asarray(gates), ape, span)
    weights = np.exp(gates + widen_ape(ape, pools)).reshape(1, pools, P, DI)
    weights /= weights.sum(2, keepdims=True)
    pooled = (weights * keys.reshape(1, pools, P, DI)).sum(2)
    np.testing.assert_allclose(pooled, expected, atol=1e-13)


def test_widened_ape_is_float32_and_exact():
    ape = jnp.asarray([[0.1], [3.0]], jnp.bfloat16)
    out = widen_ape(ape, 2)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[:, 0], [float(ape[0, 0]), 3.0] * 2)
