"""Errors, choices and logits, against numbers made by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5_jax.numerics.compare_choices import (
    Groups,
    flipped,
    judge,
    pools_of_tokens,
    shortfall,
    with_refused_groups,
)
from glm5_jax.numerics.compare_errors import array_error, sample_error
from glm5_jax.numerics.compare_logits import compare_logits
from glm5_jax.numerics.compare_steps import ORDER, model_graph, place, split_name
from glm5_jax.numerics.trace import Stats

ALL = np.ones((1, 2), bool)


def test_error_by_hand():
    a = np.array([[[3.0, 4.0], [6.0, 8.0]]])
    b = np.array([[[3.0, 4.5], [6.0, 5.0]]])
    error = array_error(a, b, ALL)
    assert error.max_abs == 3.0
    assert error.worst == (0, 1, 1)
    assert error.relative_l2 == pytest.approx(np.sqrt((0.25 + 9) / 125))
    assert error.cosine == pytest.approx((9 + 18 + 36 + 40) / np.sqrt(125 * (9 + 20.25 + 61)))
    # The median of the squared norms is (29.25 + 100) / 2: the first token is measured by that.
    assert error.positions == pytest.approx(np.array([[np.sqrt(0.25 / 64.625), 0.3]]))


@given(st.integers(0, 10_000))
def test_error_has_no_side_and_no_scale(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 5, size=rng.integers(2, 5)))
    a, b = rng.normal(size=(2, *shape))
    valid = rng.random(shape[:2]) < 0.7
    one, two = array_error(a, b, valid), array_error(b, a, valid)
    scaled = array_error(8 * a, 8 * b, valid)
    assert one.relative_l2 == two.relative_l2 == scaled.relative_l2
    assert (one.max_abs, one.worst) == (two.max_abs, two.worst)
    assert one.max_abs == np.abs(a - b)[valid].max(initial=0)
    assert np.array_equal(np.isnan(one.positions), ~valid)
    assert array_error(a, a, valid).relative_l2 == 0


def test_padding_may_hold_anything():
    a, b = np.ones((1, 2, 3)), np.ones((1, 2, 3))
    a[0, 0], b[0, 0] = np.nan, np.inf
    error = array_error(a, b, np.array([[False, True]]))
    assert (error.relative_l2, error.max_abs, error.nonfinite) == (0, 0, None)


@pytest.mark.parametrize(("x", "word"), [(np.nan, "NaN"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_what_is_no_number_is_found_and_named(x, word):
    a, b = np.ones((1, 2, 3)), np.ones((1, 2, 3))
    a[0, 1, 2] = x
    error = array_error(a, b, ALL)
    assert error.nonfinite == f"{word} against a number"
    assert error.worst == (0, 1, 2)
    assert error.relative_l2 == error.max_abs == np.inf
    assert array_error(b, a, ALL).nonfinite == f"a number against {word}"
    both = array_error(a, a, ALL)
    assert both.nonfinite == ("NaN against NaN" if np.isnan(x) else None)


def test_a_long_array_is_compared_in_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 7, 5))
    valid = rng.random((3, 7)) < 0.8
    whole = array_error(a, b, valid)
    monkeypatch.setattr("glm5_jax.numerics.compare_errors.BLOCK", 10)
    blocks = array_error(a, b, valid)
    assert blocks.relative_l2 == pytest.approx(whole.relative_l2, rel=1e-15)
    assert (blocks.worst, blocks.max_abs) == (whole.worst, whole.max_abs)
    assert np.array_equal(blocks.positions, whole.positions, equal_nan=True)


def test_no_pool_at_all():
    error = array_error(np.zeros((2, 0, 4)), np.zeros((2, 0, 4)), np.zeros((2, 0), bool))
    assert (error.relative_l2, error.worst, error.positions.shape) == (0, (), (2, 0))


def test_sample_error_is_the_larger_of_the_sample_s_and_the_norm_s():
    a, b = np.array([3.0, -np.inf, 4.0]), np.array([3.0, -np.inf, 4.0])
    same, longer = Stats(0, 1, 4, 10.0), Stats(0, 1, 4, 8.0)
    assert sample_error(a, b, same, same).relative_l2 == 0
    assert sample_error(a, b, same, longer).relative_l2 == pytest.approx(0.2)
    b = np.array([3.0, -np.inf, 0.0])
    error = sample_error(a, b, same, longer)
    assert (error.relative_l2, error.worst) == (pytest.approx(0.8), (2,))
    broken = sample_error(a, a, same, Stats(np.nan, 1, 4, 8.0))
    assert broken.nonfinite == "a number against NaN"
    assert broken.relative_l2 == np.inf


def test_choices_are_sets():
    a = np.array([[[2, 1, -1], [0, 5, 5], [7, 8, 9]]])
    b = np.array([[[1, 2, -1], [5, 0, -1], [7, 8, 6]]])
    real = np.array([[True, True, True]])
    assert list(flipped(a, b, real)) == [(0, 2, {7, 8, 9}, {6, 7, 8})]
    assert list(flipped(a, b[..., :2], real & [True, True, False])) == []


def test_shortfall_is_how_far_the_scores_must_move():
    scores, every = np.array([4.0, 3.0, 2.5, 1.0]), np.ones(4, bool)
    assert shortfall(scores, frozenset({0, 1}), every) == 0
    assert shortfall(scores, frozenset({0, 2}), every) == 0.5
    assert shortfall(scores, frozenset({3}), every) == 3
    assert shortfall(scores, frozenset({0, 1}), every & [False, True, True, True]) == np.inf
    assert shortfall(scores, frozenset({4}), every) == np.inf
    assert shortfall(scores, frozenset(), every) == 0


def test_shortfall_of_grouped_experts():
    # Three groups of two, scored by the sums 5, 4 and 4.5, of which two are kept: 0 and 2.
    scores, every, groups = np.array([4, 1, 3.5, 0.5, 2.5, 2]), np.ones(6, bool), Groups(3, 2)
    assert shortfall(scores, frozenset({0, 4}), every, groups) == 0
    assert shortfall(scores, frozenset({0, 2}), every, groups) == 0.5  # group 1 instead of 2
    assert shortfall(scores, frozenset({0, 2, 4}), every, groups) == np.inf
    assert shortfall(scores, frozenset({0, 2}), every) == 0


def test_a_flip_is_explained_by_what_the_scores_are_apart():
    every = np.ones(3, bool)

    def explained(a, b, chosen=((0,), (1,)), expected=0.0):
        scores = [None if s is None else np.array(s) for s in (a, b)]
        return judge(scores, [frozenset(c) for c in chosen], every, 1e-7, expected)

    near = explained([1.0, 0.99, 0.1], [0.98, 0.995, 0.1])
    assert near.explained and near.gap == pytest.approx(0.015) and near.allowed > near.gap
    same_scores = explained([1.0, 0.99, 0.1], [1.0, 0.99, 0.1])
    assert same_scores.explained is False
    assert same_scores.gap == pytest.approx(0.01)
    tie = explained([1.0, 1.0, 0.1], [1.0, 1.0, 0.1])
    assert tie.explained and tie.gap == 0
    assert explained([1.0, 0.99, 0.1], None, expected=0.02).explained
    assert explained([1.0, 0.99, 0.1], None, expected=0.001).explained is False
    assert explained(None, None) == (None, None, None)
    fewer = explained([1.0, 0.99, 0.1], [1.0, 0.99, 0.1], ((0, 1), (0,)))
    assert fewer.gap == 0 and fewer.explained is False  # two of them, or one: no scores make that


def test_scores_of_refused_groups_are_what_their_logits_say():
    logits = np.random.default_rng(0).normal(size=(1, 5, 4))
    right = 1 / (1 + np.exp(-logits)) + np.array([0.1, 0.2, 0.3, 7.0])
    masked = right.copy()
    masked[0, :3, :2] = masked[0, 3:, 2] = masked[..., 3] = -np.inf
    filled = with_refused_groups(masked, logits, np.ones((1, 5), bool))
    np.testing.assert_allclose(filled[..., :3], right[..., :3], rtol=1e-12)
    assert (filled[..., 3] == -np.inf).all()  # no token kept it


def test_whole_pools_of_a_selection_and_the_tail():
    # Pools of two from token 3 on; token 8 sees six tokens, three pools.
    assert pools_of_tokens(frozenset({3, 4, 7, 8, 6}), 3, 6, 2) == ({0, 2}, {6})
    assert pools_of_tokens(frozenset({3, 4, 7}), 3, 5, 2) == ({0}, {7})


def test_logits_by_hand():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    logits = compare_logits(
        np.log([[p, q, p]]) + 3, np.log([[q, q, q]]), np.array([[True, True, False]])
    )
    by_hand = 0.2 * np.log(0.2 / 0.5) + 0.7 * np.log(0.7 / 0.3) + 0.1 * np.log(0.1 / 0.2)
    assert logits.kl == pytest.approx(np.array([[by_hand, 0, np.nan]]), nan_ok=True)
    assert logits.agree.tolist() == [[False, True, False]]
    assert logits.logprob[0, 0] == pytest.approx(np.log(0.3 / 0.7))
    assert (logits.top1, logits.mean_kl) == (0.5, pytest.approx(by_hand / 2))
    assert logits.max_logprob == pytest.approx(np.log(0.7 / 0.3))


def test_graph_of_sites_without_a_config():
    names = ["final.head", "layers.1.in", "layers.0.attn.kda", "layers.0.attn.o", "layers.0.odd"]
    graph = model_graph(names, None)
    assert list(graph) == [
        *("layers.0.attn.o", "layers.0.attn.kda", "layers.0.odd", "layers.1.in", "final.head")
    ]
    assert graph["layers.0.attn.kda"].reads == (("", "layers.0.attn.o"),)
    assert graph["layers.0.odd"].reads == (("<", "layers.0.attn.kda"),)
    assert split_name("layers.12.attn.o") == (12, "attn.o")
    assert split_name("layers.attn") == (None, "layers.attn")
    assert place("attn.q") < place("attn.o") < place("attn.kda")
    assert ORDER[0] == "in"
