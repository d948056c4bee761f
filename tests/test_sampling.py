"""The choice of the next token: narrowing against NumPy in float64, draws against probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.sampling import choose, make_sampling, narrow

VOCAB = 53
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 1},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.6},
    {"temperature": 1.7, "top_p": 1.0},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.85},
    {"temperature": 1.0, "top_k": 2 * VOCAB, "top_p": 1e-6},
]
chosen = jax.jit(choose)


@pytest.fixture(scope="module")
def logits():
    return 3 * np.random.default_rng(0).standard_normal((40, VOCAB)).astype(np.float32)


def probabilities(row, temperature, top_k=None, top_p=None):
    """What is drawn from: temperature, then top-k, then top-p, a row at a time in float64."""
    scores = row.astype(np.float64) / temperature
    by_rank = sorted(range(len(scores)), key=lambda token: scores[token])
    if top_k is not None:
        least = scores[by_rank[-min(top_k, len(scores))]]
        scores = np.where(scores < least, -np.inf, scores)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    if top_p is not None:
        below = 0.0
        for token in by_rank[:-1]:
            below += p[token]
            if below > 1 - top_p:
                break
            scores[token] = -np.inf
        p = np.exp(scores - scores.max())
        p /= p.sum()
    return p


@pytest.mark.parametrize("settings", SETTINGS)
def test_narrowing_is_the_float64_computation(logits, settings):
    ours = jax.nn.softmax(narrow(logits, make_sampling(**settings)), axis=-1)
    right = np.stack([probabilities(row, **settings) for row in logits])
    np.testing.assert_array_equal(ours > 0, right > 0)
    np.testing.assert_allclose(ours, right, rtol=2e-5)


@pytest.mark.parametrize("settings", SETTINGS[:1] + SETTINGS[-2:-1])
def test_draws_have_the_probabilities(logits, settings):
    draws = 40_000
    row = logits[3]
    sampling = make_sampling(**settings, seed=5)
    tokens = chosen(jnp.tile(row, (1, draws, 1)), jnp.arange(draws)[None], sampling)[0]
    expected = draws * probabilities(row, **settings)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 5
    off = ((counts - expected) ** 2 / np.maximum(expected, 1))[likely].sum()
    degrees = likely.sum() - 1
    assert off < degrees + 4 * np.sqrt(2 * degrees)  # four standard deviations of chi-squared


def test_greedy_takes_the_likeliest_and_of_equals_the_lower(logits):
    tied = np.where(np.isin(np.arange(VOCAB), (11, 30)), 50, logits[:1])
    tokens = chosen(np.concatenate([logits, tied])[None], np.zeros((1, 41), int), None)
    np.testing.assert_array_equal(tokens, [[*logits.argmax(-1), 11]])


def test_what_equals_the_last_of_top_k_stays_and_top_p_leaves_one():
    logits = jnp.array([[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]])
    kept = narrow(logits, make_sampling(1.0, top_k=2))
    np.testing.assert_array_equal(np.isfinite(kept), [[False, True, True, True, True, False]])
    kept = narrow(jnp.zeros((1, 4)), make_sampling(1.0, top_p=1e-9))
    assert np.isfinite(kept).sum() == 1


def test_a_tiny_temperature_draws_the_likeliest(logits):
    sampling = make_sampling(1e-300, top_k=5, top_p=0.9)
    tokens = chosen(1e6 * logits[None], np.zeros((1, 40), int), sampling)
    np.testing.assert_array_equal(tokens[0], logits.argmax(-1))


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
def test_a_nan_is_told_and_spoils_its_own_place_alone(logits, settings):
    logits = logits.reshape(5, 8, VOCAB)
    broken = logits.copy()
    broken[2, 7, 3] = np.nan
    positions = np.tile(np.arange(8), (5, 1))
    tokens, right = (chosen(x, positions, make_sampling(**settings)) for x in (broken, logits))
    assert tokens[2, 7] == -1
    np.testing.assert_array_equal(np.delete(tokens, 23), np.delete(right, 23))


def test_a_draw_hangs_on_seed_row_and_position_alone(logits):
    logits = logits.reshape(5, 8, VOCAB)
    positions = np.tile(np.arange(8), (5, 1))
    sampling = make_sampling(2.0, seed=1)
    first = np.asarray(chosen(logits, positions, sampling))
    later = chosen(logits[:, 3:], positions[:, 3:], sampling)  # other tokens in the call
    np.testing.assert_array_equal(later, first[:, 3:])
    others = np.concatenate([logits[:1], -logits[1:]])
    np.testing.assert_array_equal(chosen(others, positions, sampling)[0], first[0])

    same = jnp.tile(logits[0, 0], (5, 8, 1))
    drawn = np.asarray(chosen(same, positions, sampling))
    assert len(set(map(tuple, drawn))) == 5 and len(set(map(tuple, drawn.T))) == 8
    assert (np.asarray(chosen(same, positions, make_sampling(2.0, seed=2))) != drawn).any()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "temperature: expected a number of at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: expected an integer of at least 1, got 0"),
        ({"temperature": 1.0, "top_k": 2.0}, "top_k"),
        ({"temperature": 1.0, "top_p": 0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p"),
        ({"top_k": 5}, "top_k=5 needs a temperature"),
        ({"top_p": 0.9}, "top_p=0.9 needs a temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
    ],
)
def test_settings_out_of_range_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        make_sampling(**settings)
