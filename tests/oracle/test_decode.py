"""A prompt, then 64 tokens one by one, beside transformers with its `DynamicCache`.

Both get the same tokens, so that they need not agree on any to go on. Several models share a
config, and with it what is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import numpy as np
import pytest

import glm5_jax
from glm5_jax.model import head_logits
from glm5_jax.numerics.choices import discrete_gaps, has_tie
from glm5_jax.numerics.oracle import build_oracle, oracle_available, oracle_model, oracle_sites
from glm5_jax.numerics.random_models import random_config, randomize, write_checkpoint

if not oracle_available():
    pytest.skip("needs the oracle extra: torch and transformers", allow_module_level=True)

# KDA between DSA layers with pools of two; DSA alone, one of them sharing, with pools of four.
CONFIGS = (1, 16)
MODELS = max(3, int(os.environ.get("GLM5_JAX_FUZZ", "0")) // 10)  # of each config
PROMPT, NEW = 24, 64
PADDING = np.array([0, 5, 23])  # on the left; the last prompt is a single token
WITHIN_ROUNDING = 1e-5  # see test_parity.py
CHOICES = ("attn.selection", "ffn.router.experts")


@jax.jit
def advance(model, tokens, cache, mask):
    sites = {}
    hidden, cache = model.advance(tokens, cache, mask, record=sites.__setitem__)
    chosen = {name: value for name, value in sites.items() if name.endswith(CHOICES)}
    return head_logits(hidden, model.lm_head[...]), chosen, cache


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model on disk, a left-padded batch, and the float64 oracle's pass over all of it."""

    path: object
    tokens: np.ndarray
    mask: np.ndarray
    truth: dict[str, np.ndarray]

    def ours(self, dtype):
        """Logits [B, T, vocab] and the choices, as the oracle shows them, token after token."""
        model = glm5_jax.load(self.path, dtype=dtype)
        cache = model.init_cache(len(self.tokens), PROMPT + NEW)
        logits, chosen, cache = advance(
            model, self.tokens[:, :PROMPT], cache, self.mask[:, :PROMPT]
        )
        # What is traced is left-aligned, and slots count from the first real token.
        chosen = {k: shifted(np.asarray(v), PADDING) for k, v in chosen.items()}
        steps = [(np.asarray(logits), chosen)]
        for token in self.tokens[:, PROMPT:].T:
            logits, chosen, cache = advance(model, token[:, None], cache, np.ones((3, 1), bool))
            steps.append((np.asarray(logits), {k: np.asarray(v) for k, v in chosen.items()}))
        sites = {k: np.concatenate([s[k] for _, s in steps], axis=1) for k in chosen}
        for name, slots in sites.items():
            if name.endswith("selection"):
                sites[name] = np.where(slots < 0, -1, slots + PADDING[:, None, None])
        return np.concatenate([step for step, _ in steps], axis=1), sites

    def oracle(self, dtype):
        """The oracle's logits [B, T, vocab], with its own cache."""
        import torch

        oracle = oracle_model(self.path, dtype)
        tokens, mask = (torch.tensor(h).long() for h in (self.tokens, self.mask))
        logits, cache = [], None
        with torch.no_grad():
            for start, end in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, PROMPT + NEW))]:
                out = oracle(
                    input_ids=tokens[:, start:end],
                    attention_mask=mask[:, :end],
                    cache=cache,
                    use_cache=True,
                )
                logits.append(out.logits.double().numpy())
                cache = out.cache
        return np.concatenate(logits, axis=1)

    def flips(self, sites):
        """The choices in `sites` that are not the truth's, by the relative gap of that choice."""
        gaps = discrete_gaps(self.truth, self.mask)
        return {
            name: gaps[name].relative
            for name, chosen in sites.items()
            if name in self.truth
            and not np.array_equal(
                *(np.sort(h[self.mask], axis=-1) for h in (chosen, self.truth[name]))
            )
        }

    def errors(self, logits):
        """Relative L2 distance of each real token's logits to the truth, [n]."""
        truth = self.truth["final.head"][self.mask]
        apart = np.linalg.norm(logits[self.mask] - truth, axis=-1)
        return apart / np.linalg.norm(truth, axis=-1)

    def distance(self, logits):
        """Relative L2 distance of the real tokens' logits to the truth."""
        truth = self.truth["final.head"][self.mask]
        return float(np.linalg.norm(logits[self.mask] - truth) / np.linalg.norm(truth))


def shifted(x, distance):
    """Rows of [B, T, …] moved later, what falls out at the end being padding."""
    return np.stack([np.roll(row, d, axis=0) for row, d in zip(x, distance, strict=True)])


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """MODELS models of a config without a tie; more than one that is drawn anew is too many."""

    @functools.cache
    def draw(seed):
        rng = np.random.default_rng(seed)
        config = random_config(seed)
        text = config["text_config"]
        oracle, found, tied = build_oracle(config), [], 0
        while len(found) < MODELS:
            randomize(oracle, rng)
            path = write_checkpoint(oracle, tmp_path_factory.mktemp("model"))
            # No token twice: a first layer that is DSA would find equal pools.
            rows = [rng.permutation(text["vocab_size"])[: PROMPT + NEW] for _ in PADDING]
            tokens, mask = np.stack(rows), np.arange(PROMPT + NEW) >= PADDING[:, None]
            truth = oracle_sites(oracle_model(path, "float64"), tokens, mask)
            if has_tie(truth, mask):
                tied += 1
                assert tied <= max(1, MODELS // 20), "too many models with ties"
                continue
            found.append(Case(path, tokens, mask, truth))
        return found

    return draw


@pytest.mark.parametrize("number", range(MODELS))
@pytest.mark.parametrize("seed", CONFIGS)
def test_decoding_agrees_in_float64(cases, seed, number):
    case = cases(seed)[number]
    logits, sites = case.ours("float64")
    expected = case.oracle("float64")
    assert logits.shape == expected.shape and logits.dtype == expected.dtype == np.float64
    # The truth has no choice for a layer that shares one.
    assert sites.keys() >= {name for name in case.truth if name.endswith(CHOICES)} != set()
    assert not case.flips(sites)
    scale = np.abs(expected[case.mask]).max()
    assert np.abs(logits - expected)[case.mask].max() <= 1e-10 * scale


def test_float32_decoding_is_as_near_the_truth_as_the_oracles_own(cases):
    ratios = []
    for case in (case for seed in CONFIGS for case in cases(seed)):
        logits, sites = case.ours("float32")
        flips = case.flips(sites)
        assert all(gap < WITHIN_ROUNDING for gap in flips.values()), flips
        oracle = case.distance(case.oracle("float32"))
        if not flips and oracle < 1e-4:  # the oracle flips within rounding too
            ratios.append(case.distance(logits) / oracle)
    assert len(ratios) >= 0.95 * len(CONFIGS) * MODELS - 1
    assert max(ratios) <= 2.0
    assert np.median(ratios) <= 1.1


def test_bfloat16_decoding_errs_no_more_than_the_oracles_own(cases):
    # Token by token and in the median: experts and pools flip in most models, see test_parity.py.
    every = [case for seed in CONFIGS for case in cases(seed)]
    ours = np.median(np.concatenate([case.errors(case.ours("bfloat16")[0]) for case in every]))
    oracle = np.median(np.concatenate([case.errors(case.oracle("bfloat16")) for case in every]))
    assert 1e-4 < ours <= oracle
