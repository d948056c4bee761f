"""The MTP head on whole sequences of pairs, against the step in NumPy."""

import numpy as np
import pytest

from glm5_jax.model import head_logits


@pytest.fixture(scope="module")
def run(call):
    """`run(case, hidden, tokens, mask)`: h' [B, T, X] and its logits."""

    def run(case, hidden, tokens, mask=None):
        mask = np.ones(tokens.shape, bool) if mask is None else mask
        embedded = case.arrays["embed_tokens"][tokens]
        output = call(case.model.mtp, hidden, embedded, mask)
        return output, np.asarray(head_logits(output, case.arrays["lm_head"]))

    return run


def draw(case, seed, batch, length):
    """Hidden states as the final norm leaves them, and tokens."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((batch, length, case.config.hidden_size))
    return hidden, rng.integers(case.config.vocab_size, size=(batch, length))


def assert_close(ours, reference):
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-10 * np.abs(reference).max())


@pytest.mark.parametrize("seed", range(4))
def test_head_equals_the_step_in_numpy(make_case, run, seed):
    case = make_case(seed)
    hidden, tokens = draw(case, seed, 3, 37)
    position = np.arange(37)
    mask = np.stack([position >= 0, position >= 7, (position >= 2) & (position < 30)])
    hidden[~mask] = np.nan
    output, logits = run(case, hidden, tokens, mask)
    for row, real in enumerate(mask):
        expected = case.reference(hidden[row][real], tokens[row][real])
        assert_close(output[row][real], expected)
        assert_close(logits[row][real], case.reference.logits(expected))
