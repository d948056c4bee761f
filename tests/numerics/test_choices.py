import numpy as np
import pytest

from glm5_jax.numerics.choices import Gap, cut_gap, discrete_gaps, has_tie

LOWEST = np.finfo(np.float64).min


def indexer_sites(scores, k):
    return {
        "layers.3.attn.selection.scores": np.array([scores]),
        "layers.3.attn.selection.k": np.array(k),
    }


def test_gap_is_last_chosen_less_first_refused_at_the_nearest_query():
    scores = np.array([[4.0, 1.0, 2.5], [3.0, 2.0, 7.0]])
    assert cut_gap(scores, np.isfinite(scores), 1) == Gap(1.5, 7.0)
    assert cut_gap(scores, np.isfinite(scores), 2) == Gap(1.0, 7.0)


@pytest.mark.parametrize("k", [0, 3, 8])
def test_choosing_all_or_nothing_is_never_close(k):
    scores = np.zeros((2, 3))
    assert cut_gap(scores, np.isfinite(scores), k).gap == np.inf


def test_pool_that_is_no_candidate_refuses_nothing():
    gaps = discrete_gaps(indexer_sites([[5.0, LOWEST, LOWEST], [5.0, 4.0, LOWEST]], k=2))
    assert gaps["layers.3.attn.selection"] == Gap(np.inf, 5.0)


def test_expert_outside_the_chosen_groups_refuses_nothing():
    sites = {
        "layers.1.ffn.router.experts.scores": np.array([[[0.9, 0.8, -np.inf, -np.inf]]]),
        "layers.1.ffn.router.experts.k": np.array(1),
        "layers.1.ffn.router.groups.scores": np.array([[[1.7, 1.6]]]),
        "layers.1.ffn.router.groups.k": np.array(1),
    }
    gaps = discrete_gaps(sites)
    assert gaps["layers.1.ffn.router.experts"].gap == pytest.approx(0.1)
    assert gaps["layers.1.ffn.router.groups"].gap == pytest.approx(0.1)


def test_dead_pools_tie_only_at_the_cut():
    assert has_tie(indexer_sites([[2.0, 0.0, 0.0]], k=2))
    assert not has_tie(indexer_sites([[2.0, 0.0, 0.0]], k=1))
    assert has_tie(indexer_sites([[0.0, 0.0, 0.0]], k=1))


def test_padded_query_cannot_tie():
    sites = indexer_sites([[0.0, 0.0], [1.0, 0.0]], k=1)
    assert has_tie(sites)
    assert not has_tie(sites, mask=np.array([[0, 1]]))
