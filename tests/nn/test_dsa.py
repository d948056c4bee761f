"""The DSA mixer: kv_b's halves, the scale, what a query may attend to, and a float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.nn import dsa
from glm5_jax.nn.dsa import expand_latent, masked_attention, selection_mask
from pallas_kernels.sparse_mla import xla

attend = jax.jit(masked_attention)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def reference_selection(p, x, qr, *, heads, top_k, tail):
    """The tokens of each query of one unpadded row, as sets."""
    T, (P, DI) = len(x), p["ape"].shape
    qi = (qr @ p["wq_b"].T).reshape(T, heads, DI)
    ki = x @ p["wk"].T
    ki = ki - ki.mean(-1, keepdims=True)
    ki = ki / np.sqrt((ki**2).mean(-1, keepdims=True) + 1e-6) * p["k_norm_weight"]
    ki = ki + p["k_norm_bias"]
    gate = x @ p["compress_gate"].T
    w = x @ p["weights_proj"].T * heads**-0.5
    pools = []
    for pool in range(T // P):
        at = slice(pool * P, (pool + 1) * P)
        slots = np.exp(gate[at] + p["ape"])
        pools.append((slots / slots.sum(0) * ki[at]).sum(0))
    chosen = []
    for t in range(T):
        scores = {
            pool: w[t] @ np.maximum(qi[t] @ key * DI**-0.5, 0)
            for pool, key in enumerate(pools)
            if (pool + 1) * P - 1 <= t
        }
        best = sorted(scores, key=lambda pool: -scores[pool])[: top_k // P]
        tokens = {pool * P + slot for pool in best for slot in range(P)}
        if tail:
            tokens |= set(range((t + 1) // P * P, t + 1))
        chosen.append(tokens)
    return chosen


def reference_dsa(p, x, selection, *, heads, nope, eps):
    """One unpadded row [T, X], given the tokens that each query attends to."""
    T = len(x)
    qr = rms_norm(x @ p["q_a_proj"].T, p["q_a_norm"], eps)
    q = (qr @ p["q_b_proj"].T).reshape(T, heads, nope)
    c = rms_norm(x @ p["kv_a_proj"].T, p["kv_a_norm"], eps)
    kv_b = p["kv_b_proj"].reshape(heads, -1, c.shape[-1])
    out = np.zeros((T, heads, kv_b.shape[1] - nope))
    for t, tokens in enumerate(selection):
        seen = c[sorted(tokens)]
        for h in range(heads):
            # Absorbed: scores in the latent's space, the scale still that of the query heads.
            weights = np.exp(seen @ (kv_b[h, :nope].T @ q[t, h]) * nope**-0.5)
            out[t, h] = kv_b[h, nope:] @ (weights @ seen / weights.sum()) if tokens else 0
    return out.reshape(T, -1) @ p["o_proj"].T


def query_latent(p, x, eps):
    return rms_norm(x @ p["q_a_proj"].T, p["q_a_norm"], eps)


@pytest.mark.parametrize("tail", [True, False])
def test_layer_equals_the_reference(build, call, hidden, mask, tail):
    small = build(index_kpool_always_select_tail=tail)
    c, p = small.config, small.below("layers.1.attn")
    indexer = small.below("layers.1.attn.indexer")
    out, selection = call(small.model.layers[1].attn, hidden, mask)
    assert selection.shape == (3, 23, 8 + 3 * tail)
    for row in range(3):
        x = hidden[row][mask[row]]
        qr = query_latent(p, x, c.rms_norm_eps)
        chosen = reference_selection(indexer, x, qr, heads=12, top_k=8, tail=tail)
        first = int(np.argmax(mask[row]))
        for query, tokens in enumerate(chosen):
            ours = selection[row, first + query]
            assert set(ours[ours >= 0] - first) == tokens
        expected = reference_dsa(p, x, chosen, heads=2, nope=c.qk_nope_head_dim, eps=c.rms_norm_eps)
        np.testing.assert_allclose(out[row][mask[row]], expected, atol=1e-12)


def test_below_coverage_it_is_dense_causal_attention(build, call, hidden):
    small = build(index_topk=20)
    c, p = small.config, small.below("layers.1.attn")
    out, _ = call(small.model.layers[1].attn, hidden, np.ones((3, 23), bool))
    causal = [set(range(t + 1)) for t in range(23)]
    for row in range(3):
        expected = reference_dsa(
            p, hidden[row], causal, heads=2, nope=c.qk_nope_head_dim, eps=c.rms_norm_eps
        )
        np.testing.assert_allclose(out[row], expected, atol=1e-12)


def test_kv_b_holds_key_rows_then_value_rows_for_every_head():
    A, N, V, R = 2, 3, 2, 4
    kv_b = np.zeros((A * (N + V), R))
    kv_b[:, 0] = [1, 1, 1, 20, 20, 3, 3, 3, 40, 40]
    k, v = expand_latent(jnp.ones((1, 1, R)), jnp.asarray(kv_b), A, N)
    np.testing.assert_array_equal(k[0, 0], [[1, 1, 1], [3, 3, 3]])
    np.testing.assert_array_equal(v[0, 0], [[20, 20], [40, 40]])


def test_scores_are_scaled_by_the_width_of_a_query_head():
    q, k = jnp.full((1, 1, 1, 4), 1.0), jnp.asarray([[[[1.0] * 4], [[0.0] * 4]]])
    v = jnp.asarray([[[[1.0]], [[0.0]]]])
    out = attend(q, k, v, jnp.ones((1, 1, 2), bool))
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-4 * 4**-0.5)), rtol=1e-14)


def test_absorbed_and_expanded_attention_agree():
    rng = np.random.default_rng(0)
    A, N, V, R, T = 3, 16, 12, 24, 9
    q, latent = rng.standard_normal((1, T, A, N)), rng.standard_normal((1, T, R))
    kv_b = rng.standard_normal((A * (N + V), R))
    causal = np.tril(np.ones((1, T, T), bool))
    k, v = expand_latent(jnp.asarray(latent), jnp.asarray(kv_b), A, N)
    expanded = attend(jnp.asarray(q), k, v, jnp.asarray(causal))
    w = kv_b.reshape(A, N + V, R)
    scores = np.einsum("btan,anr,bsr->bats", q, w[:, :N], latent) * N**-0.5
    weights = np.exp(np.where(causal[:, None], scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    absorbed = np.einsum("bats,bsr,avr->btav", weights, latent, w[:, N:])
    np.testing.assert_allclose(expanded, absorbed, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_query_with_nothing_to_attend_to_gets_zero(dtype):
    q, k, v = (jnp.ones((1, 2, 1, 4), dtype) for _ in range(3))
    mask = jnp.asarray([[[False, False], [True, False]]])
    out = np.asarray(attend(q, k, v, mask), np.float32)
    np.testing.assert_array_equal(out[0, :, 0], [[0.0] * 4, [1.0] * 4])
    gradient = jax.grad(lambda q: attend(q, k, v, mask).astype(jnp.float32).sum())(q)
    assert np.all(np.isfinite(np.asarray(gradient, np.float32)))


@pytest.mark.parametrize("size", [1e4, 1e-30])
def test_attention_of_extreme_scores_is_finite(size):
    q, k = jnp.full((1, 1, 1, 4), size, jnp.float32), jnp.full((1, 2, 1, 4), size, jnp.float32)
    v = jnp.asarray([[[[1.0]], [[3.0]]]], jnp.float32)
    np.testing.assert_array_equal(attend(q, k, v, jnp.ones((1, 1, 2), bool)), 2.0)


def test_unused_slots_select_no_token():
    selection = jnp.asarray([[[-1, -1], [0, -1], [-1, 2]]])
    expected = [[0, 0, 0], [1, 0, 0], [0, 0, 1]]
    np.testing.assert_array_equal(selection_mask(selection, 3)[0], expected)


def test_a_token_chosen_twice_counts_once():
    selection = jnp.asarray([[[1, 1, 0]]])
    np.testing.assert_array_equal(selection_mask(selection, 3), [[[True, True, False]]])


def test_query_without_tail_may_not_see_itself(small, call, hidden):
    # The last query of a pool has no tail; its own pool is one of up to five candidates for two.
    _, selection = call(small.model.layers[1].attn, hidden, np.ones((3, 23), bool))
    last = [q for q in range(23) if q % 4 == 3]
    sees_itself = [(q in selection[row, q]) for row in range(3) for q in last]
    assert any(sees_itself) and not all(sees_itself)
    assert all(q in selection[row, q] for row in range(3) for q in range(23) if q % 4 != 3)


def test_first_tokens_without_tail_and_pool_attend_to_nothing(build, call, hidden):
    small = build(index_kpool_always_select_tail=False)
    out, selection = call(small.model.layers[1].attn, hidden, np.ones((3, 23), bool))
    assert np.all(selection[:, :3] == -1)
    np.testing.assert_array_equal(out[:, :3], 0)
    assert np.all(np.any(out[:, 3:] != 0, axis=-1))


def test_shared_layer_uses_the_selection_that_it_is_given(small, call, hidden, mask):
    attn = small.model.layers[3].attn
    assert attn.indexer is None
    p, c = small.below("layers.3.attn"), small.config
    given = np.full((3, 23, 11), -1, np.int32)
    position = np.arange(23)
    given[0, :, 0], given[0, :, 1] = position // 2, 0
    out, used = call(attn, hidden, mask, given)
    np.testing.assert_array_equal(used, given)
    expected = reference_dsa(
        p,
        hidden[0],
        [{t // 2, 0} for t in range(23)],
        heads=2,
        nope=c.qk_nope_head_dim,
        eps=c.rms_norm_eps,
    )
    np.testing.assert_allclose(out[0], expected, atol=1e-12)


def test_shared_layer_refuses_to_select_on_nothing(small, hidden, mask):
    with pytest.raises(ValueError, match="given none to share"):
        jax.eval_shape(small.model.layers[3].attn, jnp.asarray(hidden), jnp.asarray(mask))


def test_full_layer_takes_a_selection_that_it_is_given(small, call, hidden, mask):
    attn = small.model.layers[1].attn
    expected, selection = call(attn, hidden, mask)
    out, used = call(attn, hidden, mask, selection)
    np.testing.assert_array_equal(used, selection)
    np.testing.assert_array_equal(out, expected)
    out, _ = call(attn, hidden, mask, np.full_like(selection, -1))
    assert not np.any(out)


# ---- long sequences: each query gathers its selection


@pytest.fixture
def gathers(monkeypatch):
    """Sequences of any length are long; blocks of every kind are small, and of odd sizes."""
    monkeypatch.setattr(dsa, "MASKED_UP_TO", 0)
    monkeypatch.setattr(dsa, "QUERY_BLOCK", 5)
    monkeypatch.setattr(xla, "GATHERED", 3 * 11 * 8)


@pytest.mark.parametrize("length", [3, 23])
def test_gathered_selections_give_what_the_mask_gives(small, hidden, mask, gathers, length):
    attn, inputs = small.model.layers[1].attn, (hidden[:, -length:], mask[:, -length:])

    @functools.partial(jax.jit, static_argnums=3)
    def attend(attn, x, mask, implementation):
        sites = {}
        return *attn(x, mask, None, sites.__setitem__, implementation), sites["o"]

    masked, selection, o = attend(attn, *inputs, "reference")
    out, same, gathered = attend(attn, *inputs, None)
    np.testing.assert_array_equal(same, selection)
    np.testing.assert_allclose(gathered, o, atol=1e-13)
    np.testing.assert_allclose(out, masked, atol=1e-13)


def test_gathered_selections_give_the_gradients_of_the_mask(small, hidden, mask, gathers):
    attn = small.model.layers[1].attn

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(attn, x, implementation):
        return jax.grad(
            lambda attn, x: jnp.sum(jnp.cos(attn(x, mask, None, None, implementation)[0])), (0, 1)
        )(attn, x)

    expected, ours = (gradients(attn, jnp.asarray(hidden), i) for i in ("reference", None))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)
    assert not any(np.any(x) for x in jax.tree.leaves(ours[0].indexer))


def test_padding_may_hold_anything(small, call, hidden, mask):
    expected, _ = call(small.model.layers[1].attn, hidden, mask)
    poisoned = np.where(mask[..., None], hidden, np.nan)
    actual, _ = call(small.model.layers[1].attn, poisoned, mask)
    np.testing.assert_array_equal(actual[mask], expected[mask])
    np.testing.assert_array_equal(actual[~mask], 0)


def test_bfloat16_layer_stays_bfloat16_and_near_float64(build, call, hidden, mask):
    x = hidden.astype(jnp.bfloat16)
    # One selection for both: a rounding may flip a choice, and this is not about that.
    _, selection = call(build().model.layers[1].attn, hidden, mask)
    expected, _ = call(build().model.layers[3].attn, x.astype(np.float64), mask, selection)
    actual, _ = call(build("bfloat16").model.layers[3].attn, x, mask, selection)
    assert actual.dtype == jnp.bfloat16
    error = np.linalg.norm(actual[mask].astype(np.float64) - expected[mask])
    assert error < 2e-2 * np.linalg.norm(expected[mask])
