"""The cache as a whole: its bytes, its rows, its limits; saved, restored and updated in place."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import glm5_jax
from glm5_jax.budget import state_budget
from glm5_jax.cache import Cache, DSACache, KDAState
from glm5_jax.checkpoint.tiny import make_tiny, packaged_config
from glm5_jax.config import load_config
from glm5_jax.model import TextModel
from glm5_jax.nn.params import Params
from glm5_jax.specs import leaves

CAPACITY, DEPTH = 30, 3
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "num_nextn_predict_layers": 0,
}

prefill = jax.jit(TextModel.prefill)
decode = jax.jit(TextModel.decode)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    raw = json.loads(packaged_config("tiny").read_text())
    del raw["text_config"]["first_k_dense_replace"]
    linear = raw["text_config"]["linear_attn_config"]
    del linear["kda_layers"], linear["full_attn_layers"]
    raw["text_config"] |= TWO_LAYERS
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", raw)


@pytest.fixture(scope="module")
def model(directory):
    return glm5_jax.load(directory, dtype="float64")


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 224, (3, 20))


@pytest.fixture(scope="module")
def whole(model, tokens):
    """Logits of every row, without a cache."""
    return np.asarray(jax.jit(TextModel.__call__)(model, tokens))


@pytest.fixture(scope="module")
def counts():
    return np.array([9, 12, 4])


@pytest.fixture(scope="module")
def ragged(model, tokens, counts):
    """A batch of unequal prompts, padded on the left or right or not at all, and the cache."""
    batch, mask = np.full((3, 12), 7), np.zeros((3, 12), bool)
    for row, (first, count) in enumerate(zip([3, 0, 0], counts, strict=True)):
        batch[row, first : first + count] = tokens[row, :count]
        mask[row, first : first + count] = True
    logits, cache = prefill(model, batch, model.init_cache(3, CAPACITY, DEPTH), mask)
    return np.asarray(logits), mask, cache


def next_tokens(tokens, cache):
    return np.take_along_axis(tokens, np.asarray(cache.lengths)[:, None], axis=1)[:, 0]


def assert_equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# ---- rows


def test_logits_stand_where_the_tokens_stood(ragged, whole, counts):
    logits, mask, cache = ragged
    for row, count in enumerate(counts):
        np.testing.assert_allclose(logits[row, mask[row]], whole[row, :count], atol=1e-11)
    np.testing.assert_array_equal(cache.lengths, counts)
    np.testing.assert_array_equal(cache.kept, DEPTH)
    assert np.all(np.isfinite(logits))


def test_rows_of_unequal_lengths_go_on_by_themselves(model, tokens, ragged, whole, counts):
    _, _, cache = ragged
    for step in range(6):
        logits, cache = decode(model, next_tokens(tokens, cache), cache)
        expected = whole[np.arange(3), counts + step]
        np.testing.assert_allclose(logits, expected, atol=1e-11)


def test_rows_go_back_by_different_numbers_of_tokens(model, tokens, ragged, whole, counts):
    _, _, cache = ragged
    back = np.array([0, 3, 1])
    cache = cache.rewind(counts - back)
    np.testing.assert_array_equal(cache.kept, DEPTH - back)
    for step in range(4):
        logits, cache = decode(model, next_tokens(tokens, cache), cache)
        expected = whole[np.arange(3), counts - back + step]
        np.testing.assert_allclose(logits, expected, atol=1e-11)


def test_row_without_tokens_stays_as_it_is(model, tokens, ragged):
    _, _, cache = ragged
    mask = np.array([[True] * 12, [False] * 12, [True] + [False] * 11])
    batch = np.where(mask, tokens[:, :12], 3)
    logits, after = prefill(model, batch, cache, mask)
    assert np.all(np.isfinite(logits))
    brought = np.asarray(after.lengths) - np.asarray(cache.lengths)
    np.testing.assert_array_equal(brought, [12, 0, 1])
    row = jax.tree.map(lambda h: h[1], (cache, after))
    assert_equal(*row)


@pytest.mark.parametrize("other", ["tokens", "nan"])
def test_rows_do_not_influence_one_another(model, tokens, ragged, other):
    """Bit for bit, whatever the other rows bring and hold."""
    _, _, cache = ragged
    token = next_tokens(tokens, cache)
    expected, after = decode(model, token, cache)
    if other == "tokens":
        changed = np.array([token[0], 1 + token[1] % 100, 1 + token[2] % 100])
        logits, cache = decode(model, changed, cache)
        assert np.any(logits[1:] != expected[1:])
    else:
        state = jax.tree.map(
            lambda h: h.at[1:].set(jnp.nan) if jnp.issubdtype(h.dtype, jnp.floating) else h,
            cache.layers,
        )
        logits, cache = decode(model, token, dataclasses.replace(cache, layers=state))
        assert np.all(np.isnan(logits[1:]))
    np.testing.assert_array_equal(logits[0], expected[0])
    assert_equal(*jax.tree.map(lambda h: h[0], (cache, after)))


def test_nan_in_what_no_token_wrote_has_no_effect(model, tokens, ragged):
    """Slots behind a row's length, pools that are not complete, and what was taken back."""
    _, _, cache = ragged
    cache = cache.rewind(cache.lengths - jnp.asarray([0, 2, 3]))
    token = next_tokens(tokens, cache)
    expected, _ = decode(model, token, cache)

    def poison(h, there):
        there = jnp.arange(h.shape[1]) < there[:, None]
        return jnp.where(there[..., None], h, jnp.nan)

    slots = cache.layers[1]
    poisoned = dataclasses.replace(
        slots,
        latent=poison(slots.latent, cache.lengths),
        index_keys=poison(slots.index_keys, cache.lengths),
        gates=poison(slots.gates, cache.lengths),
        pool_keys=poison(slots.pool_keys, cache.lengths // 4),
    )
    cache = dataclasses.replace(cache, layers=(cache.layers[0], poisoned))
    logits, _ = decode(model, token, cache)
    np.testing.assert_array_equal(logits, expected)


# ---- limits


def test_more_tokens_than_fit_are_refused(model, tokens, ragged):
    _, _, cache = ragged
    said = r"capacity of 30 tokens a row; row 1 has 12 and was given 19 more"
    with pytest.raises(ValueError, match=said):
        model.prefill(np.zeros((3, 19), int), cache)
    with pytest.raises(ValueError, match="row 2 has 4 and was given 27"):
        model.advance(np.zeros((3, 27), int), cache, np.arange(3)[:, None] + np.zeros(27) == 2)


def test_under_jit_a_row_that_is_full_is_nan_and_nothing_of_it_wraps(model, tokens, ragged):
    _, _, cache = ragged
    long = np.concatenate([tokens, tokens], axis=1)[:, :12]
    for _ in range(2):  # rows of 9, 12 and 4 tokens come to 33, 36 and 28
        logits, after = prefill(model, long, cache)
        assert np.isnan(logits[np.asarray(after.lengths) > CAPACITY]).all()
        assert np.isfinite(logits[np.asarray(after.lengths) <= CAPACITY]).all()
        before, cache = cache, after
    np.testing.assert_array_equal(cache.lengths, [33, 36, 28])
    for name in ("latent", "index_keys", "gates", "valid"):
        held, now = (np.asarray(getattr(c.layers[1], name)) for c in (before, cache))
        for row, length in enumerate(np.asarray(before.lengths)):
            np.testing.assert_array_equal(now[row, :length], held[row, :length])
    logits, _ = decode(model, tokens[:, 0], cache)
    assert np.isnan(logits[:2]).all() and np.isfinite(logits[2]).all()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ([9, 8, 4], "row 1: asked for 8 of its 12 tokens, can go back to 9 "),
        ([10, 12, 4], "row 0: asked for 10 of its 9 tokens, can go back to 6 "),
        (0, "row 0: asked for 0 of its 9 tokens, can go back to 6 .*rewind=3"),
        ([9, 12], r"one length for each of 3 rows, got int64 \(2,\)"),
        ([9.0, 12.0, 4.0], r"one length for each of 3 rows, got float64 \(3,\)"),
    ],
)
def test_rewind_that_is_not_possible_is_refused(ragged, target, said):
    with pytest.raises(ValueError, match=said):
        ragged[2].rewind(target)


def test_rewind_goes_no_further_than_all_rewinds_together_may(ragged, counts):
    cache = ragged[2].rewind(counts - 2)
    with pytest.raises(ValueError, match="row 0: asked for 5 of its 7 tokens, can go back to 6"):
        cache.rewind(counts - 4)
    np.testing.assert_array_equal(cache.rewind(counts - 3).kept, 0)


def test_new_cache_goes_back_no_further_than_its_beginning(model, tokens):
    mask = np.broadcast_to(np.arange(12) < 2, (3, 12))
    _, cache = prefill(model, tokens[:, :12], model.init_cache(3, CAPACITY, DEPTH), mask)
    np.testing.assert_array_equal(cache.kept, 2)
    with pytest.raises(ValueError, match="can go back to 0"):
        cache.rewind(-1)
    empty = cache.rewind(0)
    np.testing.assert_array_equal(empty.lengths, 0)


def test_under_jit_a_row_that_goes_back_too_far_is_lost(model, tokens, ragged, counts):
    target = counts - np.array([1, 4, 0])
    cache = jax.jit(Cache.rewind)(ragged[2], target)
    logits, _ = decode(model, tokens[:, 0], cache)
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[::2]).all()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"batch": 0}, "batch: expected 1 or more, got 0"),
        ({"capacity": 0}, "capacity: expected 1 or more, got 0"),
        ({"rewind": -1}, "rewind: expected 0 or more, got -1"),
    ],
)
def test_cache_of_no_size_is_refused(model, sizes, said):
    with pytest.raises(ValueError, match=said):
        model.init_cache(**{"batch": 1, "capacity": 8} | sizes)


def test_tokens_of_another_batch_than_the_cache_are_refused(model, ragged):
    with pytest.raises(ValueError, match="expected the cache's 3 rows, got 2"):
        model.prefill(np.zeros((2, 1), int), ragged[2])
    with pytest.raises(ValueError, match=r"token: expected integers \[B\], got shape \(3, 1\)"):
        model.decode(np.zeros((3, 1), int), ragged[2])


def test_cache_too_small_for_a_pool_holds_what_it_can(model, tokens, whole):
    logits, _ = model.prefill(tokens[:, :3], model.init_cache(3, 3))
    np.testing.assert_allclose(logits, whole[:, :3], atol=1e-11)


# ---- compilation


def test_one_compilation_serves_every_position(model, tokens, counts):
    """And every length that rows bring, and every rewind."""
    traces = {"prefill": 0, "decode": 0, "rewind": 0}

    def counting(name, f):
        def traced(*args):
            traces[name] += 1
            return f(*args)

        return jax.jit(traced)

    prefill = counting("prefill", TextModel.prefill)
    decode, rewind = counting("decode", TextModel.decode), counting("rewind", Cache.rewind)
    cache = model.init_cache(3, CAPACITY, DEPTH)
    for mask in (np.arange(5) < 5, np.arange(5) >= 3, np.arange(5) < 1):
        _, cache = prefill(model, tokens[:, :5], cache, np.broadcast_to(mask, (3, 5)))
    for step in range(8):
        _, cache = decode(model, jnp.asarray(tokens[:, step]), cache)
        cache = rewind(cache, cache.lengths - jnp.asarray([0, step % 2, 0]))
    assert traces == {"prefill": 1, "decode": 1, "rewind": 1}


def test_outside_jit_nothing_is_compiled_for_another_position(model, tokens):
    compiled = []
    cache = model.init_cache(3, CAPACITY)
    _, cache = model.prefill(tokens[:, :5], cache)
    _, cache = model.decode(tokens[:, 5], cache)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **kwargs: compiled.append(kwargs) if "compile" in event else None
    )
    try:
        for step in range(6, 12):
            _, cache = model.decode(tokens[:, step], cache)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled


# ---- dtypes, bytes, disk


@pytest.fixture(scope="module")
def narrow(directory):
    return glm5_jax.load(directory, dtype="bfloat16")


@pytest.fixture(scope="module")
def narrow_cache(narrow, tokens):
    logits, cache = prefill(narrow, tokens, narrow.init_cache(3, CAPACITY, DEPTH))
    return np.asarray(logits), cache


def test_bfloat16_model_computes_states_in_float32(narrow_cache, whole):
    logits, cache = narrow_cache
    kda, dsa = cache.layers
    assert isinstance(kda, KDAState) and isinstance(dsa, DSACache)
    assert kda.recurrent.dtype == kda.replay.g.dtype == kda.replay.beta.dtype == jnp.float32
    activations = (kda.conv, kda.replay.k, kda.replay.v, dsa.latent, dsa.pool_keys, dsa.gates)
    assert {h.dtype for h in activations} == {jnp.dtype(jnp.bfloat16)}
    assert np.any(np.asarray(kda.recurrent.astype(jnp.bfloat16), np.float32) != kda.recurrent)
    assert np.median(np.abs(logits - whole)) < 0.05 * whole.std()


def test_cache_survives_orbax_bit_for_bit(narrow, narrow_cache, tmp_path):
    _, cache = narrow_cache
    ocp.save(tmp_path / "cache", cache)
    abstract = jax.eval_shape(lambda: narrow.init_cache(3, CAPACITY, DEPTH))
    restored = ocp.load(tmp_path / "cache", abstract)
    assert isinstance(restored, Cache)
    assert jax.tree.structure(restored) == jax.tree.structure(cache)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(cache), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_donated_cache_is_updated_in_place(model, tokens):
    """Every byte of it: a step neither copies the cache nor makes a second one."""
    cache = model.init_cache(3, 4096)
    size = sum(h.nbytes for h in jax.tree.leaves(cache))
    step = jax.jit(TextModel.decode, donate_argnums=2)
    memory = step.lower(model, tokens[:, 0], cache).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 4
    _, after = step(model, tokens[:, 0], cache)
    assert all(h.is_deleted() for h in jax.tree.leaves(cache.layers))
    np.testing.assert_array_equal(after.lengths, 1)


def test_outside_jit_a_donated_cache_gives_its_memory_layer_by_layer(model, tokens):
    cache = model.init_cache(3, CAPACITY, DEPTH)
    expected, _ = model.prefill(tokens[:, :5], cache)
    places = [h.unsafe_buffer_pointer() for h in jax.tree.leaves(cache.layers)]
    logits, after = model.prefill(tokens[:, :5], cache, donate=True)
    np.testing.assert_array_equal(logits, expected)
    assert all(h.is_deleted() for h in jax.tree.leaves(cache.layers))
    assert [h.unsafe_buffer_pointer() for h in jax.tree.leaves(after.layers)] == places


def abstract_model(config, dtype, mtp):
    model = TextModel(config, Params(leaves(config, mtp=mtp)), mtp)
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), model)


def size(arrays):
    return sum(h.size * h.dtype.itemsize for h in jax.tree.leaves(arrays))


@pytest.mark.parametrize("name", ["glm5_3_flash", "tiny"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("batch", "rewind"), [(1, 0), (3, 5)])
@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_bytes_are_those_of_the_budget(name, dtype, batch, rewind, mtp, shared):
    config, capacity = load_config(packaged_config(name)), 1030
    if shared and name != "tiny":
        config = dataclasses.replace(config, indexer_types=("full",) * 4 + ("shared",) * 41)
    model = abstract_model(config, dtype, mtp)
    cache = jax.eval_shape(lambda m: m.init_cache(batch, capacity, rewind), model)
    budget = state_budget(config, dtype, rewind)
    kda = [s for s in cache.layers if isinstance(s, KDAState)]
    dsa = [s for s in cache.layers if isinstance(s, DSACache)]

    assert size([s.recurrent for s in kda]) == batch * budget.kda_recurrent
    assert size([s.conv for s in kda]) == batch * budget.kda_conv
    assert size([s.replay for s in kda]) == batch * budget.kda_replay
    tokens, pools = batch * capacity, batch * (capacity // config.index_kpool)
    assert size([s.latent for s in dsa]) == tokens * budget.dsa_kv_per_token
    index = [(s.index_keys, s.gates, s.valid) for s in dsa]
    assert size(index) == tokens * budget.dsa_indexer_per_token
    assert size([s.pool_keys for s in dsa]) == pools * budget.dsa_bytes_per_pool
    assert size((cache.lengths, cache.kept)) == batch * budget.counters
    head = tokens * budget.mtp_per_token + pools * budget.mtp_bytes_per_pool if mtp else 0
    assert size(cache.mtp) == head
    assert size(cache.mtp_lengths) == (batch * budget.mtp_counters if mtp else 0)
    assert size(cache) == (
        batch * (budget.fixed() + budget.counters + (budget.mtp_counters if mtp else 0))
        + tokens * (budget.dsa_kv_per_token + budget.dsa_indexer_per_token)
        + pools * budget.dsa_bytes_per_pool
        + head
    )
