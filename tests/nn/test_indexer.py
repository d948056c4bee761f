"""The k-pool indexer: pools from the first real token, their keys, their scores, the choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.nn import indexer
from glm5_jax.nn.indexer import head_weights, real_span, visible_pools

# Compiled whole: cheaper than one compilation for each of their operations.
pool_keys = jax.jit(indexer.pool_keys)
index_scores = jax.jit(indexer.index_scores)
select_pools = jax.jit(indexer.select_pools, static_argnums=2)
best_pools = jax.jit(indexer.best_pools, static_argnums=(4, 5))
select_tokens = jax.jit(indexer.select_tokens, static_argnums=(3, 4, 5))


def one_row(first, real, length):
    """The mask and span of one row with `real` tokens from `first` on."""
    position = np.arange(length)
    mask = jnp.asarray((position >= first) & (position < first + real))[None]
    return mask, real_span(mask)


def chosen_tokens(selection):
    """The set of each query of a row."""
    return [set(np.asarray(s)[np.asarray(s) >= 0].tolist()) for s in selection]


# ---- pool keys


def test_zero_gate_and_ape_give_the_mean_of_the_pool():
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 3)))
    _, span = one_row(0, 8, 8)
    pooled = pool_keys(keys, jnp.zeros((1, 8, 3)), jnp.zeros((4, 3)), span)
    np.testing.assert_allclose(pooled[0], np.asarray(keys).reshape(2, 4, 3).mean(1), rtol=1e-13)


def test_large_ape_at_one_slot_gives_that_slots_key():
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 3)))
    _, span = one_row(0, 8, 8)
    ape = jnp.zeros((4, 3)).at[2].set(30.0)
    pooled = pool_keys(keys, jnp.zeros((1, 8, 3)), ape, span)
    np.testing.assert_allclose(pooled[0], np.asarray(keys)[0, [2, 6]], atol=1e-11)


def test_each_channel_is_pooled_by_its_own_softmax():
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 2)))
    _, span = one_row(0, 4, 4)
    gate = jnp.zeros((1, 4, 2)).at[0, 1, 0].set(60.0).at[0, 3, 1].set(60.0)
    pooled = pool_keys(keys, gate, jnp.zeros((4, 2)), span)
    np.testing.assert_allclose(pooled[0, 0], [keys[0, 1, 0], keys[0, 3, 1]], rtol=1e-13)


def test_gate_and_ape_are_added_before_the_softmax():
    keys = jnp.asarray([[[1.0], [5.0]]])
    _, span = one_row(0, 2, 2)
    gate, ape = jnp.asarray([[[0.2], [0.0]]]), jnp.asarray([[0.5], [1.3]])
    weight = 1 / (1 + np.exp(1.3 - 0.7))
    pooled = pool_keys(keys, gate, ape, span)
    np.testing.assert_allclose(pooled[0, 0, 0], weight + 5 * (1 - weight), rtol=1e-14)


@pytest.mark.parametrize("padding", [1, 2, 3, 4, 5])
def test_pools_start_at_the_first_real_token(padding):
    rng = np.random.default_rng(0)
    keys, gate = rng.standard_normal((2, 1, 16, 3))
    ape = jnp.asarray(rng.standard_normal((4, 3)))
    expected = pool_keys(jnp.asarray(keys), jnp.asarray(gate), ape, one_row(0, 11, 16)[1])

    mask, span = one_row(padding, 11, 16)
    real = np.asarray(mask)[..., None]
    keys, gate = (np.where(real, np.roll(h, padding, axis=1), np.nan) for h in (keys, gate))
    pooled = pool_keys(jnp.asarray(keys), jnp.asarray(gate), ape, span)
    np.testing.assert_array_equal(pooled[:, :2], expected[:, :2])
    assert np.all(np.isfinite(pooled))


def test_bfloat16_pool_weights_are_a_float32_softmax():
    keys, gate = jnp.ones((1, 4, 2), jnp.bfloat16), jnp.full((1, 4, 2), 3.0, jnp.bfloat16)
    _, span = one_row(0, 4, 4)
    ape = jnp.zeros((4, 2), jnp.bfloat16).at[0].set(0.01)
    # 3 + 0.01 is 3 in bfloat16, and slot 0 would lose its lead.
    big = keys.at[:, 0].set(100.0)
    pooled = float(pool_keys(big, gate, ape, span)[0, 0, 0])
    weight = np.exp(float(ape[0, 0])) / (np.exp(float(ape[0, 0])) + 3)
    assert abs(pooled - (100 * weight + 1 - weight)) < 0.5


# ---- scores


def test_one_negative_head_lowers_a_pool_below_a_dead_one():
    queries = jnp.asarray([[[[1.0, 0.0, 0.0, 0.0]]]])
    keys = jnp.asarray([[[2.0, 0, 0, 0], [-2.0, 0, 0, 0]]])
    scores = np.asarray(index_scores(queries, keys, jnp.asarray([[[-3.0]]])))
    np.testing.assert_allclose(scores[0, 0], [-3.0 * 2.0 * 4**-0.5, 0.0], rtol=1e-15)
    visible = jnp.ones((1, 1, 2), bool)
    np.testing.assert_array_equal(select_pools(jnp.asarray(scores), visible, 2), [[[1, 0]]])


def test_relu_comes_before_the_weighted_sum_over_heads():
    queries = jnp.asarray([[[[1.0], [-1.0]]]])
    scores = index_scores(queries, jnp.asarray([[[3.0]]]), jnp.asarray([[[0.5, 0.25]]]))
    np.testing.assert_allclose(scores, 1.5)  # relu after the sum would give 0.75


def test_head_weights_are_signed_and_scaled_by_the_root_of_the_heads():
    logits = jnp.asarray([[[4.0, -8.0, 0.0, 1.0]]])
    np.testing.assert_allclose(head_weights(logits), logits / 2, rtol=1e-15)
    assert head_weights(logits.astype(jnp.bfloat16)).dtype == jnp.float32


def test_scores_of_bfloat16_operands_are_float32():
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, 3, 2, 8)), jnp.bfloat16)
    k = jnp.asarray(rng.standard_normal((1, 4, 8)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((1, 3, 2)), jnp.float32)
    expected = index_scores(*(a.astype(jnp.float64) for a in (q, k, w)))
    scores = index_scores(q, k, w)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, atol=1e-5)


# ---- what a query may choose


def test_a_pool_is_visible_only_when_its_last_token_is():
    mask, span = one_row(2, 9, 11)
    visible = np.asarray(visible_pools(span.seen(mask), 2, 4))[0]
    last_of_pool = [5, 9]  # tokens 2..5 and 6..9
    for query in range(11):
        assert visible[query].tolist() == [query >= 2 and last <= query for last in last_of_pool]


def test_padded_queries_see_no_pool():
    mask, span = one_row(1, 5, 9)
    visible = np.asarray(visible_pools(span.seen(mask), 4, 2))[0]
    assert not visible[0].any()
    assert not visible[6:].any()
    assert visible[5, :2].all()


@pytest.mark.parametrize("giant", [1e30, np.inf, np.nan])
def test_a_pool_that_is_not_visible_is_never_chosen(giant):
    scores = jnp.asarray([[[1.0, giant, 2.0]]])
    pools = select_pools(scores, jnp.asarray([[[True, False, True]]]), 3)
    np.testing.assert_array_equal(pools, [[[2, 0, -1]]])


def test_ties_go_to_the_lower_pool():
    scores = jnp.asarray([[[1.0, 3.0, 3.0, 1.0, 3.0]]])
    visible = jnp.ones((1, 1, 5), bool)
    np.testing.assert_array_equal(select_pools(scores, visible, 4), [[[1, 2, 4, 0]]])


def test_positive_and_negative_zero_are_one_score():
    scores = jnp.asarray([[[-0.0, 0.0, -0.0, 0.0]]])
    visible = jnp.ones((1, 1, 4), bool)
    np.testing.assert_array_equal(select_pools(scores, visible, 3), [[[0, 1, 2]]])


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_the_choice_is_the_best_visible_pools_in_order(scores, count, random):
    visible = [random.random() < 0.7 for _ in scores]
    expected = sorted((p for p, v in enumerate(visible) if v), key=lambda p: (-scores[p], p))
    expected = (expected + [-1] * len(scores))[: min(count, len(scores))]
    # Padded to one width, for one compilation.
    scores = jnp.asarray([[scores + [99] * (12 - len(scores))]], jnp.float32)
    visible = jnp.asarray([[visible + [False] * (12 - len(visible))]])
    pools = np.asarray(select_pools(scores, visible, 12))[0, 0]
    np.testing.assert_array_equal(pools[: len(expected)], expected)


def test_integer_operands_tie_exactly_and_the_lower_pool_wins():
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.integers(-2, 3, (1, 4, 3, 4)), jnp.float32)
    keys = rng.integers(-2, 3, (1, 3, 4))
    keys = jnp.asarray(np.concatenate([keys, keys], axis=1), jnp.float32)
    weights = jnp.asarray(rng.integers(-3, 4, (1, 4, 3)), jnp.float32)
    scores = np.asarray(index_scores(queries, keys, weights))
    np.testing.assert_array_equal(scores[..., :3], scores[..., 3:])
    pools = np.asarray(select_pools(jnp.asarray(scores), jnp.ones((1, 4, 6), bool), 6))
    for query in pools[0]:
        place = {pool: at for at, pool in enumerate(query)}
        assert all(place[p] < place[p + 3] for p in range(3))


# ---- the choice without all scores in memory


def integers(pools, queries, heads=3, width=4, seed=0):
    """Operands of which a few hundred different scores come, exactly, whatever their order."""
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)
        for shape in ((1, queries, heads, width), (1, pools, width), (1, queries, heads))
    )


def by_hand(operands, visible, count):
    """The best `count` of the first `visible` pools of each query, by a stable sort."""
    q, k, w = (np.asarray(x, np.float64)[0] for x in operands)
    scores = np.einsum("th,thp->tp", w, np.maximum(np.einsum("thd,pd->thp", q, k), 0))
    chosen = np.full((len(q), count), -1)
    for row, score, n in zip(chosen, scores, visible, strict=True):
        best = np.argsort(-score[:n], kind="stable")[:count]
        row[: len(best)] = best
    return chosen, scores


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_every_tiling_makes_the_same_choice_among_ties(monkeypatch, tile):
    monkeypatch.setattr(indexer, "POOL_TILE", tile)
    monkeypatch.setattr(indexer, "POOL_WINDOW", 3 * tile)
    operands, visible = integers(450, 5), np.array([450, 0, 3, 449, 128])
    expected, _ = by_hand(operands, visible, 40)
    pools = indexer.best_pools(*operands, jnp.asarray(visible)[None] * 4 + 3, 4, 40)
    np.testing.assert_array_equal(pools[0], expected)


def test_scores_that_overflow_rank_last_but_before_none(monkeypatch):
    """Most score −inf: the cut falls among them, and where few pools are visible all are chosen."""
    monkeypatch.setattr(indexer, "POOL_TILE", 7)
    monkeypatch.setattr(indexer, "POOL_WINDOW", 21)
    operands, visible = integers(100, 5, heads=1, width=1), np.array([100, 0, 3, 99, 30])
    queries, keys, weights = jnp.ones_like(operands[0]), operands[1], -jnp.ones_like(operands[2])
    keys = jnp.where(jnp.arange(100)[:, None] % 20 == 13, keys, jnp.inf)
    expected, scores = by_hand((queries, keys, weights), visible, 40)
    assert np.sum(scores[0] > -np.inf) == 5
    seen = jnp.asarray(visible)[None] * 4
    pools = indexer.best_pools(queries, keys, weights, seen, 4, 40)
    np.testing.assert_array_equal(pools[0], expected)
    visible = jnp.asarray(np.arange(100) < visible[:, None])
    pools = select_pools(jnp.asarray(scores)[None], visible[None], 40)
    np.testing.assert_array_equal(pools[0], expected)


def test_every_visible_pool_is_scored_once(monkeypatch):
    """Of the windows, of four tiles each, the third has one tile to do, and the fourth none."""
    scored = []

    def counted(queries, keys, weights):
        jax.debug.callback(lambda keys: scored.extend(np.asarray(keys)[0, :, 0]), keys)
        return index_scores(queries, keys, weights)

    monkeypatch.setattr(indexer, "POOL_TILE", 4)
    monkeypatch.setattr(indexer, "POOL_WINDOW", 16)
    monkeypatch.setattr(indexer, "index_scores", counted)
    keys = jnp.arange(64.0).reshape(1, 64, 1)
    ones = jnp.ones((1, 2, 1, 1)), keys, jnp.ones((1, 2, 1))
    pools = indexer.best_pools(*ones, jnp.asarray([[4 * 34, 4]]), 4, 3)
    np.testing.assert_array_equal(pools[0], [[33, 32, 31], [0, -1, -1]])
    jax.effects_barrier()
    assert sorted(scored) == list(range(36))


def test_a_million_tokens_of_context_and_thousands_of_ties():
    """262,144 pools, of which the cut falls among equals; what is not visible is NaN."""
    pools, there = 2**18, 2**18 - 1000
    queries, keys, weights = integers(pools, 1, seed=1)
    expected, scores = by_hand((queries, keys, weights), [there], 512)
    assert np.sum(scores[0, :there] == scores[0, expected[0, -1]]) > 2000
    keys = keys.at[:, there:].set(jnp.nan)
    seen = jnp.full((1, 1), 4 * there)
    np.testing.assert_array_equal(best_pools(queries, keys, weights, seen, 4, 512)[0], expected)


def test_scores_of_a_long_context_are_never_in_memory_whole():
    shapes = (1, 128, 3, 4), (1, 2**18, 4), (1, 128, 3)
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    seen = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    memory = best_pools.lower(*operands, seen, 4, 512).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 128 * 2**18 * 4 / 8


# ---- from pools to tokens


def test_width_is_top_k_and_the_tail_however_few_pools_there_are():
    mask, span = one_row(0, 6, 6)
    for chosen in ([[[0]] * 6], [[[-1, 0]] * 6], [[[]] * 6]):
        pools = jnp.asarray(chosen, jnp.int32)
        assert select_tokens(pools, span.seen(mask), span.first, 4, 12, True).shape == (1, 6, 15)
        assert select_tokens(pools, span.seen(mask), span.first, 4, 12, False).shape == (1, 6, 12)


def test_full_selection_keeps_its_tail():
    mask, span = one_row(1, 11, 12)  # pools 1..4, 5..8, tail 9..11
    pools = jnp.broadcast_to(jnp.asarray([1, 0]), (1, 12, 2))
    selection = np.asarray(select_tokens(pools, span.seen(mask), span.first, 4, 8, True))[0, 11]
    np.testing.assert_array_equal(selection, [5, 6, 7, 8, 1, 2, 3, 4, 9, 10, 11])


def test_tail_is_what_a_query_sees_of_its_own_incomplete_pool():
    mask, span = one_row(2, 9, 12)
    none = jnp.full((1, 12, 1), -1)
    selection = chosen_tokens(select_tokens(none, span.seen(mask), span.first, 4, 4, True)[0])
    expected = [set(), set(), {2}, {2, 3}, {2, 3, 4}, set(), {6}, {6, 7}, {6, 7, 8}, set(), {10}]
    assert selection == [*expected, set()]


def test_without_the_tail_only_pools_are_selected():
    mask, span = one_row(0, 7, 7)
    none = jnp.full((1, 7, 1), -1)
    assert np.all(np.asarray(select_tokens(none, span.seen(mask), span.first, 4, 4, False)) == -1)


def test_pools_of_one_token_have_no_tail():
    mask, span = one_row(1, 3, 4)
    pools = jnp.asarray([[[-1, -1], [0, -1], [1, 0], [2, 0]]])
    selection = np.asarray(select_tokens(pools, span.seen(mask), span.first, 1, 2, True))[0]
    np.testing.assert_array_equal(selection, [[-1, -1], [1, -1], [2, 1], [3, 1]])


# ---- the indexer


def qr_of(small, hidden):
    return np.random.default_rng(5).standard_normal((*hidden.shape[:2], small.config.q_lora_rank))


def test_no_more_tokens_than_top_k_are_all_selected(small, call, hidden):
    attn, qr = small.model.layers[1].attn, qr_of(small, hidden)
    selection = call(attn.indexer, hidden[:1], qr[:1], np.ones((1, 23), bool))
    # Two complete pools fit; the third is complete at token 11.
    for query in range(11):
        assert chosen_tokens(selection[0])[query] == set(range(query + 1))
    assert {len(s) for s in chosen_tokens(selection[0])[11:]} == {8, 9, 10, 11}


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_sequences_around_one_pool_select_what_they_see(small, call, hidden, length):
    attn, qr = small.model.layers[1].attn, qr_of(small, hidden)
    mask = np.ones((1, length), bool)
    selection = call(attn.indexer, hidden[:1, :length], qr[:1, :length], mask)
    assert selection.shape == (1, length, 8 + 3)
    assert chosen_tokens(selection[0]) == [set(range(t + 1)) for t in range(length)]


@pytest.mark.parametrize("padding", [1, 2, 3, 4, 5, 6])
def test_left_padding_shifts_the_selection_and_nothing_else(small, call, hidden, padding):
    attn, qr = small.model.layers[1].attn, qr_of(small, hidden)
    rows = slice(0, 1)
    real = 23 - padding
    alone = call(attn.indexer, hidden[rows], qr[rows], np.arange(23)[None] < real)
    roll = [np.roll(h[rows], padding, axis=1) for h in (hidden, qr)]
    shifted = call(attn.indexer, *roll, np.arange(23)[None] >= padding)
    expected = np.where(alone < 0, -1, alone + padding)[:, :real]
    np.testing.assert_array_equal(shifted[:, padding:], expected)
    assert np.all(shifted[:, :padding] == -1)


def test_nan_in_a_padded_token_is_never_selected(small, call, hidden, mask):
    attn, qr = small.model.layers[1].attn, qr_of(small, hidden)
    expected = call(attn.indexer, hidden, qr, mask)
    poisoned = [np.where(mask[..., None], h, np.nan) for h in (hidden, qr)]
    actual = call(attn.indexer, *poisoned, mask)
    np.testing.assert_array_equal(actual, expected)
    assert np.all(actual[~mask] == -1)
    for row in range(3):
        for selection in chosen_tokens(actual[row]):
            assert mask[row][list(selection)].all()


def test_changing_the_future_changes_no_choice(small, call, hidden):
    attn, qr = small.model.layers[1].attn, qr_of(small, hidden)
    mask = np.ones((3, 23), bool)
    changed = hidden.copy()
    changed[:, 16:] *= 100
    before = call(attn.indexer, hidden, qr, mask)
    after = call(attn.indexer, changed, qr, mask)
    np.testing.assert_array_equal(before[:, :16], after[:, :16])
    assert np.any(before[:, 16:] != after[:, 16:])
