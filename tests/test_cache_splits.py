"""However a sequence is cut into calls, the result is that of one pass over the whole.

Every row of a batch is cut elsewhere: calls have one shape, and what a row does not bring is
padding. So one compilation serves every cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
import pytest

import glm5_jax
from glm5_jax.cache import Cache
from glm5_jax.checkpoint.tiny import make_tiny
from glm5_jax.model import TextModel
from glm5_jax.numerics.random_models import random_config

LENGTH, CAPACITY = 72, 75
# Around the convolution's taps, the pools, the chunks of the recurrence, past index_topk.
CUTS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 63, 64, 65, 71])
SECOND_CUTS = np.array([2, 3, 4, 15, 9, 33, 8, 64, 10, 65, 16, 17, 18, 34, 64, 65, 66, 72])
ROWS = len(CUTS)
FLOAT64 = 1e-10  # of the logits' scale

# What is random among them: pools of 4, 2 and 1 tokens, 2 to 4 taps, both gates, with and without
# the tail, a layer that shares a selection.
CASES = [
    ("tiny", "float64", 5),
    (15, "float64", 5),
    (24, "float64", 0),
    (34, "float64", 5),
    ("tiny", "float32", 5),
    (15, "float32", 0),
]


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Logits [B, T, vocab], and for each layer that selects its choice [B, T, W], sorted."""

    logits: np.ndarray
    selections: dict[str, np.ndarray]

    @classmethod
    def of(cls, logits, sites) -> Run:
        chosen = {k: np.sort(v, axis=-1) for k, v in sites.items() if k.endswith("selection")}
        return cls(np.asarray(logits), chosen)


@jax.jit
def forward(model, tokens):
    sites = {}
    return model(tokens, record=sites.__setitem__), sites


@jax.jit
def advance(model, tokens, cache, mask):
    sites = {}
    hidden, cache = model.advance(tokens, cache, mask, record=sites.__setitem__)
    logits = hidden @ model.lm_head[...].T
    return logits, {k: v for k, v in sites.items() if k.endswith("selection")}, cache


decode = jax.jit(TextModel.decode)
rewind = jax.jit(Cache.rewind)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model, a sequence for each row, and what one pass over all of them gives."""

    model: TextModel
    tokens: np.ndarray
    whole: Run
    truth: Run  # of the float64 model
    depth: int

    def empty(self) -> Cache:
        return self.model.init_cache(ROWS, CAPACITY, rewind=self.depth)

    def bring(self, cache: Cache, until: np.ndarray) -> tuple[Run, Cache]:
        """The next tokens of each row up to `until`, padded left in every other row."""
        start = np.asarray(cache.lengths)
        count = until - start
        first = np.where(np.arange(ROWS) % 2, LENGTH - count, 0)
        position = np.arange(LENGTH) - first[:, None]
        mask = (position >= 0) & (position < count[:, None])
        at = np.clip(start[:, None] + position, 0, LENGTH - 1)
        batch = np.where(mask, np.take_along_axis(self.tokens, at, axis=1), 0)
        logits, sites, cache = advance(self.model, batch, cache, mask)
        np.testing.assert_array_equal(cache.lengths, until)
        # Logits stand where the tokens stood; what is traced is left-aligned.
        at = (first[:, None] + np.arange(LENGTH)) % LENGTH
        return Run.of(np.take_along_axis(np.asarray(logits), at[..., None], axis=1), sites), cache

    def brought(self, cache: Cache, cuts: Sequence[np.ndarray]) -> Run:
        """The sequences in calls up to each of the cuts and then to the end, put together."""
        runs = []
        starts = [np.asarray(cache.lengths), *cuts]
        for cut in (*cuts, np.full(ROWS, LENGTH)):
            run, cache = self.bring(cache, cut)
            runs.append(run)

        def together(parts):
            out = np.zeros_like(parts[0])
            for part, start in zip(parts, starts, strict=True):
                for row, at in enumerate(start):
                    out[row, at:] = part[row, : LENGTH - at]
            return out

        names = runs[0].selections
        selections = {k: together([r.selections[k] for r in runs]) for k in names}
        return Run(together([r.logits for r in runs]), selections)

    def check(self, run: Run, since: np.ndarray | int = 0) -> None:
        """The same choices and, within rounding, the same logits as the whole, `since` a token."""
        real = np.arange(LENGTH) >= np.broadcast_to(since, ROWS)[:, None]
        scale = np.abs(self.truth.logits).max()
        if self.truth is self.whole:
            assert np.abs(run.logits - self.whole.logits)[real].max() <= FLOAT64 * scale
            assert run.selections.keys() == self.whole.selections.keys() != set()
            for name, chosen in run.selections.items():
                np.testing.assert_array_equal(chosen[real], self.whole.selections[name][real])
            return
        # A row whose choices rounding flipped says nothing; hardly any may.
        same = self._choose_alike(run, real) & self._choose_alike(self.whole, real)
        assert same.sum() >= ROWS - 2
        # Over all rows: where a row has but a few tokens left, its own two errors are noise.
        judged = same[:, None] & real
        ours, whole = (
            np.linalg.norm((r.logits - self.truth.logits)[judged]) for r in (run, self.whole)
        )
        assert 0 < ours <= 2 * whole

    def _choose_alike(self, run: Run, real: np.ndarray) -> np.ndarray:
        """[B] bool: whether all selections of a row are those of the truth."""
        same = np.ones(ROWS, bool)
        for name, chosen in run.selections.items():
            agrees = (chosen == self.truth.selections[name]).all(-1)
            same &= (agrees | ~real).all(-1)
        return same


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @functools.cache
    def directory(model):
        config = None if model == "tiny" else random_config(model)
        return make_tiny(tmp_path_factory.mktemp("model") / "m", config, dtype="float32")

    @functools.cache
    def loaded(model, dtype):
        loaded = glm5_jax.load(directory(model), dtype=dtype)
        shape = ROWS, LENGTH
        tokens = np.random.default_rng(3).integers(0, loaded.config.vocab_size, shape)
        return loaded, tokens, Run.of(*forward(loaded, tokens))

    return loaded


@pytest.fixture(scope="module", params=CASES, ids=lambda p: "-".join(map(str, p)))
def case(request, load):
    model, dtype, depth = request.param
    loaded, tokens, whole = load(model, dtype)
    truth = whole if dtype == "float64" else load(model, "float64")[2]
    return Case(loaded, tokens, whole, truth, depth)


def test_one_call(case):
    case.check(case.brought(case.empty(), []))


def test_two_calls(case):
    case.check(case.brought(case.empty(), [CUTS]))


def test_three_calls(case):
    case.check(case.brought(case.empty(), [np.minimum(CUTS, SECOND_CUTS), SECOND_CUTS]))


def test_token_after_token(case):
    cache, logits = case.empty(), []
    for token in case.tokens.T:
        out, cache = decode(case.model, token, cache)
        logits.append(np.asarray(out))
    # `decode` traces nothing: the choices are not what this test is about.
    case.check(Run(np.stack(logits, axis=1), case.whole.selections))
    np.testing.assert_array_equal(cache.lengths, LENGTH)
    np.testing.assert_array_equal(cache.kept, case.depth)


def test_tokens_taken_back_have_never_been_there(case):
    """After a cut some tokens, of which each row takes back another number, all of them wrong."""
    depth = case.depth
    right = depth - np.arange(ROWS) % (depth + 1)
    _, cache = case.bring(case.empty(), np.minimum(CUTS, LENGTH - depth))
    start = np.asarray(cache.lengths)
    for i in range(depth):
        token = case.tokens[np.arange(ROWS), start + i]
        wrong = (token + 7) % case.model.config.vocab_size
        _, cache = decode(case.model, np.where(i < right, token, wrong), cache)
    cache = rewind(cache, start + right)
    np.testing.assert_array_equal(cache.lengths, start + right)
    np.testing.assert_array_equal(cache.kept, right)
    case.check(case.brought(cache, []), since=start + right)
