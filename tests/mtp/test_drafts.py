"""Drafts and their verification: no token changes, and the head's cache is that of true pairs."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.budget import state_budget
from glm5_jax.cache import Cache
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.config import load_config
from glm5_jax.drafts import Pairs, draft, speculate, verify, write_pairs
from glm5_jax.model import TextModel, head_logits
from glm5_jax.nn.params import Params
from glm5_jax.specs import leaves

# Two of the pools are selected, of up to eleven that there are in the end.
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
CAPACITY, NEW = 52, 30
ALL = np.full(4, True)


@pytest.fixture(scope="module")
def case(make_case):
    return make_case(5, index_share_for_mtp_iteration=True, **TEXT)


def noisy(noise):
    """Sampling: the likeliest token, each place of a row with noise of its own [B, S, vocab]."""

    def choose(logits, positions):
        rows = jnp.arange(len(noise))[:, None]
        return jnp.argmax(logits + noise[rows, positions], axis=-1).astype(jnp.int32)

    return choose


class Begun(NamedTuple):
    """Rows after their prompts: what `speculate` goes on from, and the first token chosen."""

    cache: Cache
    pairs: Pairs
    first: jax.Array


@functools.partial(jax.jit, static_argnames="drafts")
def begin(model, prompt, noise, drafts):
    lengths = jnp.asarray(PROMPTS, jnp.int32)
    cache = model.init_cache(4, CAPACITY, rewind=drafts)
    hidden, cache = model.advance(prompt, cache, jnp.arange(prompt.shape[1]) < lengths[:, None])
    last = hidden[jnp.arange(4), lengths - 1][:, None]
    first = noisy(noise)(head_logits(last, model.lm_head[...]), lengths[:, None])
    _, _, cache = write_pairs(model, cache, Pairs(hidden, jnp.roll(prompt, -1, 1), lengths - 1))
    later = ((0, 0), (0, drafts))
    pairs = Pairs(jnp.pad(last, (*later, (0, 0))), jnp.pad(first, later), jnp.ones(4, jnp.int32))
    return Begun(cache, pairs, first[:, 0])


@functools.partial(jax.jit, static_argnames="drafts")
def step(model, cache, pairs, drafts, noise, active):
    return speculate(model, cache, pairs, drafts, noisy(noise), active)


@pytest.fixture(scope="module")
def prompt(case):
    rng = np.random.default_rng(0)
    return rng.integers(case.config.vocab_size, size=(4, PROMPTS.max())).astype(np.int32)


@pytest.fixture(scope="module")
def noise_of(case):
    """`noise_of(size)`: for every place of every row."""
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((4, CAPACITY + 8, case.config.vocab_size))
    return lambda size: size * noise


@pytest.fixture(scope="module")
def without_drafts(case, prompt, noise_of):
    """`without_drafts(size)`: rows [4, T] as calls of the whole model continue the prompts."""
    run = jax.jit(lambda model, tokens, mask: model(tokens, mask))

    @functools.cache
    def continued(size):
        rows, noise = np.arange(4), noise_of(size)
        tokens = np.zeros((4, PROMPTS.max() + NEW), np.int32)
        tokens[:, : prompt.shape[1]] = prompt
        for lengths in (PROMPTS + new for new in range(NEW)):
            mask = np.arange(tokens.shape[1]) < lengths[:, None]
            logits = np.asarray(run(case.model, tokens, mask))[rows, lengths - 1]
            tokens[rows, lengths] = np.argmax(logits + noise[rows, lengths], axis=-1)
        return tokens

    return continued


def new_tokens(rows):
    """The tokens after each prompt."""
    return [row[n : n + NEW].tolist() for row, n in zip(rows, PROMPTS, strict=True)]


def run_to_the_end(case, prompt, noise, drafts, active=lambda call: ALL):
    """The new tokens of each row, and the place in a pool and the count of every verdict."""
    cache, pairs, first = begin(case.model, prompt, noise, drafts)
    found, seen, call = [[token] for token in first.tolist()], [], 0
    while min(map(len, found)) < NEW:
        running = np.array([len(tokens) < NEW for tokens in found]) & active(call)
        places = np.asarray(cache.lengths) % 4
        verdict, pairs, cache = step(case.model, cache, pairs, drafts, noise, running)
        counts = np.asarray(verdict.count)
        for row, count in enumerate(counts):
            found[row] += verdict.tokens[row, :count].tolist()
        seen += zip(places[running].tolist(), counts[running].tolist(), strict=True)
        assert not counts[~running].any()
        # Every token but the newest has its pair, in the cache or still to do.
        np.testing.assert_array_equal(cache.mtp_lengths + pairs.count, cache.lengths)
        call += 1
    return [tokens[:NEW] for tokens in found], seen


# ---- tokens


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0.0, 6.0, 1e6], ids=["greedy", "sampled", "agreed"])
def test_tokens_are_those_without_drafts(case, prompt, noise_of, without_drafts, drafts, size):
    found, seen = run_to_the_end(case, prompt, noise_of(size), drafts)
    assert found == new_tokens(without_drafts(size))
    places, counts = (set(values) for values in zip(*seen, strict=True))
    if size == 6.0:
        assert places == {0, 1, 2, 3} and counts == {*range(1, drafts + 2)}
    if size == 1e6:
        assert counts == {drafts + 1}


def test_calls_compile_once_wherever_they_stand(case, prompt, noise_of):
    run_to_the_end(case, prompt, noise_of(6.0), 4)
    compiled = step._cache_size()
    run_to_the_end(case, prompt, noise_of(0.0), 4)
    assert step._cache_size() == compiled


def test_row_that_rests_goes_on_as_if_it_had_not(case, prompt, noise_of, without_drafts):
    def rest(call):
        return np.arange(4) != {1: 0, 2: 0, 4: 2}.get(call, 4)

    found, _ = run_to_the_end(case, prompt, noise_of(6.0), 4, rest)
    assert found == new_tokens(without_drafts(6.0))


def test_rows_do_not_influence_one_another(case, prompt, noise_of, without_drafts):
    changed = prompt.copy()
    changed[2] = changed[2, ::-1]
    found, _ = run_to_the_end(case, changed, noise_of(6.0), 4)
    expected = new_tokens(without_drafts(6.0))
    assert found[2] != expected[2]
    assert [found[row] for row in (0, 1, 3)] == [expected[row] for row in (0, 1, 3)]


# ---- what is verified, and the cache after it


@pytest.fixture(scope="module")
def greedy(without_drafts):
    return without_drafts(0.0)


@pytest.fixture(scope="module")
def hidden(case, greedy):
    """What the trunk makes of the greedy rows, [4, T, X]."""

    @jax.jit
    def run(model, tokens):
        return model.advance(tokens, model.init_cache(4, CAPACITY))[0]

    return np.asarray(run(case.model, greedy))


def likeliest(logits, positions):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


LOGITS: list[np.ndarray] = []


@functools.partial(jax.jit, static_argnames="drafts")
def compiled_draft(model, cache, pairs, drafts):
    def choose(logits, positions):
        jax.debug.callback(LOGITS.append, logits[:, 0], ordered=True)
        return likeliest(logits, positions)

    return draft(model, cache, pairs, drafts, choose)


def only_draft(case, cache, pairs, drafts=4):
    """Greedy drafts [B, k], the logits of each [B, k, vocab], and the cache."""
    LOGITS.clear()
    guesses, cache = jax.block_until_ready(compiled_draft(case.model, cache, pairs, drafts))
    jax.effects_barrier()
    return np.asarray(guesses), np.stack(LOGITS, axis=1), cache


@jax.jit
def only_verify(model, cache, newest, guesses):
    return verify(model, cache, newest, guesses, likeliest, jnp.full(len(newest), True))


# Accepted drafts of each row in each call: every number at every place in a pool.
ACCEPTED = np.array([[0, 1, 2, 3, 4], [3, 4, 0, 1, 2], [1, 2, 3, 0, 4], [4, 3, 1, 2, 0]])


def test_any_number_of_drafts_is_accepted_at_any_place(case, prompt, noise_of, greedy, hidden):
    cache, pairs, _ = begin(case.model, prompt, noise_of(0.0), 4)
    rows, lengths, seen = np.arange(4), PROMPTS.copy(), set()
    for accepted in ACCEPTED.T:
        _, _, cache = only_draft(case, cache, pairs)
        guesses = greedy[rows[:, None], lengths[:, None] + 1 + np.arange(4)]
        wrong = np.arange(4) == accepted[:, None]
        guesses = np.where(wrong, (guesses + 1) % case.config.vocab_size, guesses)
        verdict, pairs, cache = only_verify(case.model, cache, pairs.newest, guesses)
        seen |= {*zip(lengths % 4, accepted, strict=True)}
        np.testing.assert_array_equal(verdict.count, accepted + 1)
        for row, count in enumerate(accepted + 1):
            expected = greedy[row, lengths[row] + 1 : lengths[row] + 1 + count]
            np.testing.assert_array_equal(verdict.tokens[row, :count], expected)
        lengths = lengths + accepted + 1
        np.testing.assert_array_equal(cache.lengths, lengths)
    assert len(seen) == 20

    _, _, cache = only_draft(case, cache, pairs)
    fresh = case.model.init_cache(4, CAPACITY)
    true = Pairs(hidden, np.roll(greedy, -1, axis=1), lengths)
    fresh = jax.jit(lambda *inputs: write_pairs(*inputs)[2])(case.model, fresh, true)
    np.testing.assert_array_equal(cache.mtp_lengths, lengths)
    np.testing.assert_array_equal(cache.mtp.valid, fresh.mtp.valid)
    for name in ("latent", "index_keys", "gates", "pool_keys"):
        ours, expected = np.asarray(getattr(cache.mtp, name)), np.asarray(getattr(fresh.mtp, name))
        for row, length in enumerate(lengths):
            kept = length // (4 if name == "pool_keys" else 1)
            np.testing.assert_allclose(ours[row, :kept], expected[row, :kept], atol=1e-12)


# ---- drafts


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_drafts_are_those_of_the_step_in_numpy(make_case, greedy, hidden, shared):
    case = make_case(5, index_share_for_mtp_iteration=shared, **TEXT)
    cache, start = case.model.init_cache(4, CAPACITY), np.zeros(4, int)
    rows, seen = np.arange(4), set()
    for call in range(12):
        count = (rows + call) % 5 + 1
        at = np.minimum(start[:, None] + np.arange(5), greedy.shape[1] - 2)
        given = np.where(
            (np.arange(5) < count[:, None])[..., None], hidden[rows[:, None], at], np.nan
        )
        pairs = Pairs(given, greedy[rows[:, None], at + 1], count)
        guesses, logits, cache = only_draft(case, cache, pairs)
        start += count
        seen |= {*(start % 4)}
        for row, end in enumerate(start):
            true = hidden[row, :end], greedy[row, 1 : end + 1]
            expected, scores = case.reference.draft(*true, 4, shared)
            assert guesses[row].tolist() == expected
            np.testing.assert_allclose(
                logits[row], scores, rtol=0, atol=1e-10 * np.abs(scores).max()
            )
    assert seen == {0, 1, 2, 3} and start.max() > 4 * TEXT["index_topk"]


def test_first_draft_after_a_prompt_is_that_of_the_whole_row(
    case, prompt, noise_of, greedy, hidden, call
):
    cache, pairs, _ = begin(case.model, prompt, noise_of(0.0), 4)
    _, logits, _ = only_draft(case, cache, pairs)
    length = PROMPTS.max()
    mask = np.arange(length) < PROMPTS[:, None]
    embedded = case.arrays["embed_tokens"][greedy[:, 1 : length + 1]]
    whole = call(case.model.mtp, hidden[:, :length], embedded, mask)[np.arange(4), PROMPTS - 1]
    expected = np.asarray(head_logits(whole[:, None], case.arrays["lm_head"]))[:, 0]
    np.testing.assert_allclose(logits[:, 0], expected, rtol=0, atol=1e-10 * np.abs(expected).max())

    # Without the pairs of the prompt the draft is another.
    cold = dataclasses.replace(cache, mtp_lengths=0 * cache.mtp_lengths)
    _, logits, _ = only_draft(case, cold, pairs)
    assert np.all(np.abs(logits[:, 0] - expected).max(axis=1) > 1e-3)


# ---- shapes, bytes, and what is refused


def abstract_model(name):
    config = load_config(packaged_config(name))
    return TextModel(config, Params(leaves(config)), mtp=True)


@pytest.mark.parametrize("name", ["tiny", "glm5_3_flash"])
def test_cache_of_the_head_has_the_bytes_of_the_budget(name):
    model = abstract_model(name)
    cache = jax.eval_shape(lambda model: model.init_cache(3, 40, rewind=4), model)
    slots = (cache.mtp.latent, cache.mtp.index_keys, cache.mtp.gates, cache.mtp.valid)
    budget = state_budget(model.config, "bfloat16")
    found = sum(array.size * array.dtype.itemsize for array in slots)
    assert found == 3 * 40 * budget.mtp_per_token > 0
    assert cache.mtp_lengths.shape == (3,)


def test_bfloat16_step_keeps_every_shape_and_dtype():
    model = abstract_model("tiny")

    def run(model, active):
        cache = model.init_cache(2, 16, rewind=3)
        X = model.config.hidden_size
        tokens = jnp.zeros((2, 4), jnp.int32)
        pairs = Pairs(jnp.zeros((2, 4, X), jnp.bfloat16), tokens, jnp.ones(2, jnp.int32))
        return (pairs, cache), speculate(model, cache, pairs, 3, likeliest, active)

    before, (verdict, *after) = jax.eval_shape(run, model, jax.ShapeDtypeStruct((2,), bool))
    assert jax.tree.leaves(before) == jax.tree.leaves(tuple(after))
    assert (verdict.tokens.shape, verdict.count.shape) == ((2, 4), (2,))


def test_drafts_without_a_head_are_refused(case):
    trunk = {path: x for path, x in case.arrays.items() if not path.startswith("mtp.")}
    trunk_model = TextModel.from_leaves(case.config, trunk)
    pairs = Pairs(jnp.zeros((1, 1, 1)), jnp.zeros((1, 1), int), jnp.ones(1, int))
    for model, cache, says in (
        (trunk_model, trunk_model.init_cache(1, 8), "model was loaded without"),
        (case.model, trunk_model.init_cache(1, 8), "cache was made without"),
    ):
        with pytest.raises(ValueError, match=says):
            draft(model, cache, pairs, 2, likeliest)


def test_more_drafts_than_can_be_taken_back_are_refused(case):
    cache = case.model.init_cache(1, 8, rewind=2)
    tokens = jnp.zeros((1, 4), int)
    with pytest.raises(ValueError, match=r"3 drafts need .* rewind=3 or more, got 2"):
        verify(case.model, cache, tokens[:, 0], tokens[:, 1:], likeliest, jnp.full(1, True))
