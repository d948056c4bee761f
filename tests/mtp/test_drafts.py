"""Drafts and their verification: no token changes, and the head's cache is that of true pairs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.drafts import Pairs, draft, speculate, verify, write_pairs
from glm5_jax.model import head_logits

# KDA and DSA; two pools of four are selected, of ten and more that there are in the end.
TEXT = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "index_kpool": 4,
    "index_topk": 8,
    "index_kpool_always_select_tail": True,
}
PROMPTS = np.array([13, 10, 15, 12])  # one for each place in a pool
CAPACITY, NEW = 64, 30


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "own"])
def case(request, make_case):
    """Draft steps attend to the first one's selection, or each runs the indexer."""
    return make_case(5, index_share_for_mtp_iteration=request.param, **TEXT)


@pytest.fixture(scope="module")
def shared(make_case):
    return make_case(5, index_share_for_mtp_iteration=True, **TEXT)


def noisy(noise):
    """Sampling: the likeliest token, each place of a row with noise of its own [B, S, vocab]."""

    def choose(logits, positions):
        rows = jnp.arange(len(noise))[:, None]
        return jnp.argmax(logits + noise[rows, positions], axis=-1).astype(jnp.int32)

    return choose


class Run(NamedTuple):
    """Rows that have been begun: what `speculate` goes on from, and the first token chosen."""

    cache: object
    pairs: Pairs
    first: np.ndarray


@functools.partial(jax.jit, static_argnames="drafts")
def begin(model, prompt, lengths, noise, drafts):
    mask = jnp.arange(prompt.shape[1]) < lengths[:, None]
    cache = model.init_cache(len(prompt), CAPACITY, rewind=drafts)
    hidden, cache = model.advance(prompt, cache, mask)
    last = hidden[jnp.arange(len(prompt)), lengths - 1][:, None]
    first = noisy(noise)(head_logits(last, model.lm_head[...]), lengths[:, None])
    _, _, cache = write_pairs(model, cache, Pairs(hidden, jnp.roll(prompt, -1, 1), lengths - 1))
    pad = ((0, 0), (0, drafts))
    pairs = Pairs(jnp.pad(last, (*pad, (0, 0))), jnp.pad(first, pad), jnp.ones_like(lengths))
    return Run(cache, pairs, first[:, 0])


@functools.partial(jax.jit, static_argnames="drafts")
def step(model, cache, pairs, drafts, noise, active):
    return speculate(model, cache, pairs, drafts, noisy(noise), active)


@functools.partial(jax.jit, static_argnames="drafts")
def only_draft(model, cache, pairs, drafts):
    logits = []

    def choose(values, positions):
        jax.debug.callback(lambda v, p: logits.append((v, p)), values, positions)
        return jnp.argmax(values, axis=-1).astype(jnp.int32)

    return draft(model, cache, pairs, drafts, choose)


@jax.jit
def only_verify(model, cache, newest, guesses, noise, active):
    return verify(model, cache, newest, guesses, noisy(noise), active)


@pytest.fixture(scope="module")
def prompt(shared):
    rng = np.random.default_rng(0)
    return rng.integers(shared.config.vocab_size, size=(4, PROMPTS.max())).astype(np.int32)


@pytest.fixture(scope="module")
def noise(shared):
    """Noise of size 1, to be scaled."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((4, CAPACITY + 8, shared.config.vocab_size))


@pytest.fixture(scope="module")
def without_drafts(shared, prompt):
    """`without_drafts(noise)`: rows [4, CAPACITY] as whole calls of the model continue them."""
    run = jax.jit(lambda model, tokens, mask: model(tokens, mask))

    def continued(noise):
        rows, tokens = np.arange(4), np.zeros((4, PROMPTS.max() + NEW), np.int32)
        tokens[:, : prompt.shape[1]] = prompt
        for end in range(NEW):
            lengths = PROMPTS + end
            mask = np.arange(tokens.shape[1]) < lengths[:, None]
            logits = np.asarray(run(shared.model, tokens, mask))[rows, lengths - 1]
            tokens[rows, lengths] = np.argmax(logits + noise[rows, lengths], axis=-1)
        return [row[n : n + NEW].tolist() for row, n in zip(tokens, PROMPTS, strict=True)]

    return continued


@pytest.fixture(scope="module")
def greedy(without_drafts, noise):
    return without_drafts(0 * noise)


@pytest.fixture(scope="module")
def hidden(shared, greedy):
    """The trunk's output [4, T, X] for the greedy rows."""
    cache = shared.model.init_cache(4, CAPACITY)
    return np.asarray(shared.model.advance(greedy, cache)[0])


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0.0, 4.0, 1e6], ids=["none", "some", "all"])
def test_tokens_are_those_without_drafts(shared, prompt, noise, without_drafts, drafts, size):
    noise = size * noise
    expected = without_drafts(noise)
    run = begin(shared.model, prompt, PROMPTS, noise, drafts)
    found = [[token] for token in run.first.tolist()]
    cache, pairs, counts = run.cache, run.pairs, []
    while min(map(len, found)) < NEW:
        active = np.array([len(tokens) < NEW for tokens in found])
        verdict, pairs, cache = step(shared.model, cache, pairs, drafts, noise, active)
        for row, count in enumerate(np.asarray(verdict.count)):
            found[row] += verdict.tokens[row, :count].tolist()
        counts += np.asarray(verdict.count)[active].tolist()
    print(np.bincount(counts))
    assert [tokens[:NEW] for tokens in found] == expected
