"""The memory of the KDA mixer: the recurrent state, the convolution's columns, what is replayed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.cache import KDAState, empty_cache
from glm5_jax.nn.kda import KDA
from glm5_jax.nn.padding import Stretch

K, HD = 4, 32


advance = jax.jit(KDA.advance)


def empty(small, rows, depth=0, dtype="float64"):
    state = empty_cache(small.config, rows, 32, depth, dtype, False).layers[0]
    assert isinstance(state, KDAState)
    return state


def run(attn, x, state, start=0):
    """The outputs of all of x [B, T, X] in one call, and the state after it."""
    B, T, _ = x.shape
    stretch = Stretch(jnp.broadcast_to(jnp.asarray(start), B), jnp.full(B, T))
    return advance(attn, jnp.asarray(x), stretch, state)


@pytest.fixture(scope="module")
def attn(small):
    return small.model.layers[0].attn


@pytest.fixture(scope="module")
def whole(attn, call, hidden):
    return call(attn, hidden, np.ones((3, 23), bool))


@pytest.mark.parametrize("depth", [0, 2])
def test_calls_of_few_tokens_equal_one_of_all(small, attn, hidden, whole, depth):
    """Also shorter than the convolution, whose history is read before it is overwritten."""
    state, at, outputs = empty(small, 3, depth), 0, []
    for tokens in (1, 2, 3, 4, 5, 1, 1, 4, 2):
        out, state = run(attn, hidden[:, at : at + tokens], state, at)
        outputs.append(out)
        at += tokens
    assert at == 23
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, atol=1e-12)


@pytest.mark.parametrize("depth", [0, 2])
def test_columns_are_those_before_convolution_and_activation_oldest_first(
    small, attn, hidden, depth
):
    p = small.below("layers.0.attn")
    columns = np.stack([hidden @ p[f"{n}_proj"].T for n in "qkv"], axis=2)
    padded = np.concatenate([np.zeros((3, K - 1 + depth, 3, HD)), columns], axis=1)
    _, state = run(attn, hidden[:, :2], empty(small, 3, depth))
    np.testing.assert_allclose(state.conv, padded[:, 2 : K + 1 + depth], atol=1e-13)
    _, state = run(attn, hidden[:, 2:7], state, 2)
    np.testing.assert_allclose(state.conv, padded[:, 7 : K + 6 + depth], atol=1e-13)


@pytest.mark.parametrize("depth", [0, 2])
def test_state_of_a_padded_row_is_that_after_its_last_real_token(small, attn, hidden, depth):
    """Padding behind a row neither decays its state nor moves its columns, whatever it holds."""
    counts = np.array([5, 1, 0])
    x = hidden[:, :5].copy()
    x[np.arange(5) >= counts[:, None]] = np.nan
    start = empty(small, 3, depth)
    out, state = advance(
        attn, jnp.asarray(x), Stretch(jnp.zeros(3, int), jnp.asarray(counts)), start
    )
    assert np.all(np.isfinite(out))
    for row, count in enumerate(counts):
        alone = jax.tree.map(lambda h, row=row: h[row : row + 1], start)
        if count:
            expected, alone = run(attn, hidden[row : row + 1, :count], alone)
            np.testing.assert_allclose(out[row, :count], expected[0], atol=1e-13)
        for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(ours[row], theirs[0], atol=1e-13)


def test_recurrent_state_lags_behind_by_what_can_be_taken_back(small, attn, hidden):
    _, lagging = run(attn, hidden[:, :9], empty(small, 3, depth=4))
    _, plain = run(attn, hidden[:, :5], empty(small, 3))
    np.testing.assert_allclose(lagging.recurrent, plain.recurrent, atol=1e-13)


def test_rewound_state_is_that_of_the_tokens_that_stay(small, attn, hidden):
    lengths = jnp.asarray([9, 6, 5])
    start = empty(small, 3, depth=4)
    _, state = run(attn, hidden[:, :9], start)
    state = state.rewind(9 - lengths)
    # A fresh run over what stays can be taken back further: it has more to replay.
    _, fresh = advance(attn, jnp.asarray(hidden[:, :9]), Stretch(jnp.zeros(3, int), lengths), start)
    x = np.stack([hidden[row, n : n + 3] for row, n in enumerate([9, 6, 5])])
    ours, theirs = (run(attn, x, s, lengths)[0] for s in (state, fresh))
    np.testing.assert_allclose(ours, theirs, atol=1e-13)
    at_once, _ = run(attn, hidden[:, :12], start)
    expected = [at_once[row, n : n + 3] for row, n in enumerate([9, 6, 5])]
    np.testing.assert_allclose(ours, np.stack(expected), atol=1e-13)


def test_bfloat16_model_keeps_its_recurrent_state_in_float32(build, hidden):
    small = build("bfloat16")
    x = jnp.asarray(hidden, jnp.bfloat16)
    _, state = run(small.model.layers[0].attn, x, empty(small, 3, 2, "bfloat16"))
    dtypes = jax.tree.map(lambda h: h.dtype.name, state)
    replay = dataclasses.replace(
        dtypes.replay, k="bfloat16", v="bfloat16", g="float32", beta="float32"
    )
    assert dtypes == KDAState("float32", "bfloat16", replay)


@pytest.mark.parametrize("depth", [0, 3])
def test_4096_tokens_one_by_one_leave_the_state_that_they_leave_at_once(build, depth):
    small = build("float32")
    attn = small.model.layers[0].attn
    x = np.random.default_rng(0).standard_normal((1, 4096, small.config.hidden_size), np.float32)

    @jax.jit
    def one_by_one(attn, x, state):
        def step(state, token):
            y, state = attn.advance(token, Stretch(jnp.zeros(1, int), jnp.ones(1, int)), state)
            return state, y

        state, y = jax.lax.scan(step, state, x[0, :, None, None])
        return y[:, 0, 0], state

    y, state = one_by_one(attn, x, empty(small, 1, depth, "float32"))
    expected, at_once = run(attn, x, empty(small, 1, depth, "float32"))
    error = np.linalg.norm(state.recurrent - at_once.recurrent)
    assert error <= 1e-4 * np.linalg.norm(at_once.recurrent)
    assert np.linalg.norm(y - expected[0]) <= 1e-4 * np.linalg.norm(expected)
