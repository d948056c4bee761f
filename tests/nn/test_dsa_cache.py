"""The memory of the DSA mixer: slots, pools that come in many calls, and what has no effect."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.cache import DSACache, empty_cache
from glm5_jax.nn import dsa, indexer
from glm5_jax.nn.blocks import map_queries
from glm5_jax.nn.dsa import DSA
from glm5_jax.nn.indexer import index_scores, score_pools
from glm5_jax.nn.padding import Stretch
from pallas_kernels.sparse_mla import xla

CAPACITY, POOL = 26, 4  # six pools, and two slots that no pool has

advance = jax.jit(DSA.advance)


def empty(small, rows=3, layer=1, dtype="float64"):
    cache = empty_cache(small.config, rows, CAPACITY, 0, dtype, False).layers[layer]
    assert isinstance(cache, DSACache)
    return cache


def run(attn, x, cache, start=0, count=None, selection=None):
    """Outputs and selection of x [B, T, X] in one call, and the cache after it."""
    B, T, _ = x.shape
    count = np.full(B, T) if count is None else count
    stretch = Stretch(jnp.broadcast_to(jnp.asarray(start), B), jnp.asarray(count))
    return advance(attn, jnp.asarray(x), stretch, cache, selection)


@pytest.fixture(scope="module")
def attn(small):
    return small.model.layers[1].attn


@pytest.fixture(scope="module")
def whole(attn, call, hidden):
    """Outputs and selection of a call without a cache."""
    return call(attn, hidden, np.ones((3, 23), bool))


@pytest.fixture(scope="module")
def at_once(small, attn, hidden):
    return run(attn, hidden, empty(small))


def in_two(small, attn, hidden, cut):
    """Two calls of one shape: what a row does not bring is padding of NaN."""
    x = np.full((2, 3, 23, hidden.shape[-1]), np.nan)
    x[0, :, :cut], x[1, :, : 23 - cut] = hidden[:, :cut], hidden[:, cut:]
    first = run(attn, x[0], empty(small), 0, np.full(3, cut))
    second = run(attn, x[1], first[2], cut, np.full(3, 23 - cut))
    out, selection = (
        np.concatenate([f[:, :cut], s[:, : 23 - cut]], axis=1)
        for f, s in zip(first[:2], second[:2], strict=True)
    )
    return out, selection, second[2]


def test_one_call_equals_attention_without_a_cache(at_once, whole):
    out, selection, _ = at_once
    np.testing.assert_allclose(out, whole[0], atol=1e-12)
    np.testing.assert_array_equal(selection, whole[1])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 9, 10, 11, 12, 22])
def test_pool_that_two_calls_bring_has_the_key_of_one_call(small, attn, hidden, at_once, cut):
    out, selection, cache = in_two(small, attn, hidden, cut)
    np.testing.assert_allclose(cache.pool_keys, at_once[2].pool_keys, atol=1e-13)
    np.testing.assert_array_equal(selection, at_once[1])
    np.testing.assert_allclose(out, at_once[0], atol=1e-12)


def test_chunk_of_five_past_top_k_sees_its_own_tokens_causally(small, attn, hidden, whole):
    """Eleven tokens, more than the eight that are selected, then five in one call."""
    _, _, cache = run(attn, hidden[:, :11], empty(small))
    out, selection, _ = run(attn, hidden[:, 11:16], cache, 11)
    np.testing.assert_allclose(out, whole[0][:, 11:16], atol=1e-12)
    np.testing.assert_array_equal(selection, whole[1][:, 11:16])
    assert np.all(selection <= np.arange(11, 16)[:, None])


def test_each_row_has_its_own_place(small, attn, hidden, at_once):
    starts, cache = np.array([3, 10, 17]), empty(small)
    _, _, cache = run(attn, hidden, cache, 0, starts)
    x = np.stack([hidden[row, s : s + 5] for row, s in enumerate(starts)])
    out, selection, cache = run(attn, x, cache, starts)
    for row, s in enumerate(starts):
        np.testing.assert_allclose(out[row], at_once[0][row, s : s + 5], atol=1e-12)
        np.testing.assert_array_equal(selection[row], at_once[1][row, s : s + 5])
        pools = (s + 5) // POOL
        expected = at_once[2].pool_keys[row, :pools]
        np.testing.assert_allclose(cache.pool_keys[row, :pools], expected, atol=1e-13)
    np.testing.assert_array_equal(cache.valid, np.arange(CAPACITY) < starts[:, None] + 5)


def poisoned(cache, lengths):
    """NaN in every slot behind the first `lengths`, and in every pool that is not complete."""

    def poison(h, there):
        return jnp.where((jnp.arange(h.shape[1]) < there[:, None])[..., None], h, jnp.nan)

    slots = {n: poison(getattr(cache, n), lengths) for n in ("latent", "index_keys", "gates")}
    pool_keys = poison(cache.pool_keys, lengths // POOL)
    return dataclasses.replace(cache, **slots, pool_keys=pool_keys)


@pytest.mark.parametrize("start", [5, 11, 16])
def test_nan_in_slots_without_a_token_has_no_effect(small, attn, hidden, start):
    _, _, cache = run(attn, hidden, empty(small), 0, np.array([start, start - 2, 0]))
    lengths = np.array([start, start - 2, 0])
    expected = run(attn, hidden[:, 16:21], cache, lengths)
    actual = run(attn, hidden[:, 16:21], poisoned(cache, lengths), lengths)
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.all(np.isfinite(actual[0]))


def test_nan_in_slots_that_were_taken_back_has_no_effect(small, attn, hidden, at_once):
    """One row goes back by thirteen tokens, another by one; what they left is poison."""
    lengths = np.array([10, 22, 23])
    cache = poisoned(at_once[2].rewind(jnp.asarray(lengths)), lengths)
    np.testing.assert_array_equal(cache.valid, np.arange(CAPACITY) < lengths[:, None])
    x = np.stack([np.roll(row, -n, axis=0)[:5] for row, n in zip(hidden, lengths, strict=True)])
    out, selection, _ = run(attn, x, cache, lengths, np.array([5, 1, 0]))
    np.testing.assert_allclose(out[0], at_once[0][0, 10:15], atol=1e-12)
    np.testing.assert_array_equal(selection[0], at_once[1][0, 10:15])
    np.testing.assert_allclose(out[1, 0], at_once[0][1, 22], atol=1e-12)
    assert np.all(selection[2] == -1)


def test_slot_that_is_not_valid_is_left_out_whatever_selected_it(small, attn, hidden, at_once):
    cache = dataclasses.replace(
        at_once[2],
        latent=at_once[2].latent.at[:, 7].set(jnp.nan),
        valid=at_once[2].valid.at[:, 7].set(False),
    )
    given = np.full((3, 1, 11), -1, np.int32)
    given[..., :2] = 7, 5
    out, _, _ = run(attn, hidden[:, :1], cache, 23, selection=jnp.asarray(given))
    given[..., 0] = -1
    expected, _, _ = run(attn, hidden[:, :1], at_once[2], 23, selection=jnp.asarray(given))
    np.testing.assert_array_equal(out, expected)


def test_key_of_a_pool_is_computed_once(small, attn, hidden):
    """When its last token arrives, and never again: what it came from may change."""
    _, _, cache = run(attn, hidden[:, :9], empty(small))
    keys = np.asarray(cache.pool_keys)
    assert np.all(keys[:, :2] != 0) and not np.any(keys[:, 2:])
    changed = dataclasses.replace(cache, index_keys=cache.index_keys.at[:, :8].set(1e3))
    _, _, changed = run(attn, hidden[:, 9:12], changed, 9)
    _, _, cache = run(attn, hidden[:, 9:12], cache, 9)
    np.testing.assert_array_equal(changed.pool_keys[:, :2], keys[:, :2])
    np.testing.assert_array_equal(changed.pool_keys[:, 2], cache.pool_keys[:, 2])
    assert np.any(keys[:, 2] != cache.pool_keys[:, 2])


def test_nothing_is_written_past_the_last_slot(small, attn, hidden):
    _, _, cache = run(attn, hidden, empty(small))
    _, _, full = run(attn, hidden[:, :5], cache, 23)
    for name in ("latent", "index_keys", "gates"):
        before, after = np.asarray(getattr(cache, name)), np.asarray(getattr(full, name))
        np.testing.assert_array_equal(after[:, :23], before[:, :23], err_msg=name)
        assert np.all(np.any(after[:, 23:] != before[:, 23:], axis=-1))
    np.testing.assert_array_equal(full.pool_keys[:, :5], cache.pool_keys[:, :5])


def test_shared_layer_keeps_no_index_and_uses_the_slots_it_is_given(small, call, hidden, whole):
    attn, cache = small.model.layers[3].attn, empty(small, layer=3)
    assert cache.index_keys is cache.gates is cache.pool_keys is None
    expected, _ = call(attn, hidden, np.ones((3, 23), bool), whole[1])
    _, _, cache = run(attn, hidden[:, :20], cache, selection=jnp.asarray(whole[1][:, :20]))
    out, used, _ = run(attn, hidden[:, 20:], cache, 20, selection=jnp.asarray(whole[1][:, 20:]))
    np.testing.assert_array_equal(used, whole[1][:, 20:])
    np.testing.assert_allclose(out, expected[:, 20:], atol=1e-12)
    with pytest.raises(ValueError, match="given none to share"):
        run(attn, hidden[:, :1], cache)


def test_tied_pools_are_chosen_alike_however_they_come(build):
    """Integers and powers of two: every pool has exactly the same score, and the first two win."""
    small = build("float32", index_n_heads=16, index_head_dim=4)
    rng = np.random.default_rng(0)
    path = "layers.1.attn.indexer."
    arrays = {k: v for k, v in small.arrays.items() if k.startswith(path)}
    arrays = {k: np.zeros_like(v) for k, v in arrays.items()}
    for name in ("wq_b", "weights_proj", "k_norm_bias"):  # keys are the bias alone
        arrays[path + name] = rng.integers(-2, 3, arrays[path + name].shape).astype(np.float32)
    of_layer = small.with_arrays(arrays).layers[1].attn.indexer
    x = rng.integers(-2, 3, (3, 23, small.config.hidden_size)).astype(np.float32)
    qr = rng.integers(-2, 3, (3, 23, small.config.q_lora_rank)).astype(np.float32)
    whole = np.asarray(jax.jit(type(of_layer).__call__)(of_layer, x, qr, np.ones((3, 23), bool)))
    assert {*whole[:, 12:, :8].ravel()} == set(range(8))
    step = jax.jit(type(of_layer).advance)
    for tokens in (1, 5, 23):
        cache, at = empty(small, dtype="float32"), 0
        while at < 23:
            part, count = slice(at, at + tokens), min(tokens, 23 - at)
            pad = [(0, 0), (0, tokens - count), (0, 0)]
            stretch = Stretch(jnp.full(3, at), jnp.full(3, count))
            padded = (jnp.asarray(np.pad(h[:, part], pad)) for h in (x, qr))
            selection, cache = step(of_layer, *padded, stretch, cache)
            np.testing.assert_array_equal(selection[:, :count], whole[:, part])
            at += tokens


# ---- blocks and tiles


def test_blocks_of_queries_and_tiles_of_pools_change_nothing(
    small, attn, hidden, at_once, monkeypatch
):
    for module, name, size in (
        (indexer, "QUERY_BLOCK", 5),
        (indexer, "POOL_TILE", 2),
        (indexer, "POOL_WINDOW", 4),
        (dsa, "QUERY_BLOCK", 7),
        (xla, "GATHERED", 3 * 11 * 11 * 4),
    ):
        monkeypatch.setattr(module, name, size)
    stretch = Stretch(jnp.zeros(3, int), jnp.full(3, 23))
    out, selection, _ = jax.jit(lambda *a: DSA.advance(*a))(
        attn, jnp.asarray(hidden), stretch, empty(small)
    )
    np.testing.assert_allclose(out, at_once[0], atol=1e-12)
    np.testing.assert_array_equal(selection, at_once[1])


@pytest.mark.parametrize("block", [1, 4, 7, 8, 30])
def test_blocks_are_put_together_in_order(block):
    x, y = jnp.arange(2 * 7 * 3).reshape(2, 7, 3), jnp.arange(14).reshape(2, 7)
    out = map_queries(lambda x, y: x * y[..., None], block, x, y)
    np.testing.assert_array_equal(out, x * y[..., None])


@pytest.mark.parametrize("pools", [0, 1, 4, 5, 8, 9, 11])
def test_tiles_reach_the_pools_that_there_are_and_no_further(monkeypatch, pools):
    monkeypatch.setattr(indexer, "POOL_TILE", 4)
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((2, 3, 2, 5)), rng.standard_normal((2, 11, 5))
    inputs = tuple(map(jnp.asarray, (queries, keys, rng.standard_normal((2, 3, 2)))))
    scores = np.asarray(score_pools(*inputs, jnp.asarray(pools)))
    expected = index_scores(*inputs)
    reached = -(-pools // 4) * 4
    np.testing.assert_allclose(scores[..., :pools], expected[..., :pools], rtol=1e-13)
    assert np.all(scores[..., reached:] == -np.inf)
