"""The whole model by selections that are gathered, against the plain form that masks all scores."""

import jax
import numpy as np
import pytest

from glm5_jax.nn import dsa

TOKENS = 23
CHUNK = 7  # within coverage, which is eight tokens of complete pools and the tail


@pytest.fixture(scope="module")
def batch():
    """Four rows of tokens with 0 to 3 of left padding: every query at every place in a pool."""
    tokens = np.random.default_rng(3).integers(0, 67, (4, TOKENS))
    return tokens, np.arange(TOKENS) >= np.arange(4)[:, None]


@pytest.fixture(scope="module")
def plain(small, batch):
    """Logits, and the selections of the first DSA layer, computed from all scores."""
    return forward(small.model, batch, "reference")


def forward(model, batch, implementation):
    @jax.jit
    def run(model, tokens, mask):
        sites = {}
        logits = model(tokens, mask, record=sites.__setitem__, implementation=implementation)
        return logits, sites["layers.1.attn.selection"]

    return jax.tree.map(np.asarray, run(model, *batch))


def chosen(selection):
    """The tokens of each query, in their order."""
    return np.sort(selection, axis=-1)


def assert_same(logits, expected, mask):
    scale = np.abs(expected[mask]).max()
    np.testing.assert_allclose(logits[mask], expected[mask], rtol=0, atol=1e-10 * scale)


def test_one_call_that_gathers_equals_one_that_masks(small, batch, plain, monkeypatch):
    monkeypatch.setattr(dsa, "MASKED_UP_TO", 0)
    logits, selection = forward(small.model, batch, None)
    np.testing.assert_array_equal(chosen(selection), chosen(plain[1]))
    assert_same(logits, plain[0], batch[1])


def test_prefill_in_chunks_and_decoding_equal_one_call_that_masks(small, batch, plain):
    """Chunks of seven tokens up to 14, then one at a time: all offsets, in and past coverage."""
    tokens, mask = batch
    pad = np.argmax(mask, axis=1)[:, None]

    @jax.jit
    def step(model, tokens, cache):
        sites = {}
        hidden, cache = model.advance(tokens, cache, record=sites.__setitem__)
        return model.lm_head[...] @ hidden[..., None], sites["layers.1.attn.selection"], cache

    # Compact, as in a cache: the i-th real token of a row stands at i.
    order = np.minimum(pad + np.arange(TOKENS), TOKENS - 1)
    real = np.arange(TOKENS) < TOKENS - pad
    tokens = np.take_along_axis(tokens, order, axis=1)
    expected = np.take_along_axis(plain[0], order[..., None], axis=1)
    selected = np.take_along_axis(plain[1], order[..., None], axis=1)
    selected = np.where(selected < 0, -1, selected - pad[..., None])

    cache, at = small.model.init_cache(4, TOKENS), 0
    logits, selection = np.empty_like(expected), np.empty_like(selected)
    for width in [CHUNK, CHUNK, *[1] * (TOKENS - 2 * CHUNK)]:
        part = np.s_[:, at : at + width]
        out, choice, cache = step(small.model, tokens[part], cache)
        logits[part], selection[part] = out[..., 0], choice
        at += width
    np.testing.assert_array_equal(chosen(selection)[real], chosen(selected)[real])
    assert_same(logits, expected, real)
