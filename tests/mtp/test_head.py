"""The MTP head on whole rows of pairs, against the step in NumPy."""

import jax
import numpy as np
import pytest

from glm5_jax.model import head_logits


@pytest.fixture(scope="module")
def run(call):
    """`run(case, hidden, tokens, mask)`: h' [B, T, X]."""

    def run(case, hidden, tokens, mask=None):
        mask = np.ones(tokens.shape, bool) if mask is None else mask
        return call(case.model.mtp, hidden, case.arrays["embed_tokens"][tokens], mask)

    return run


def draw(case, seed, batch=1, length=37):
    """Hidden states of the size that the final norm leaves them in, and tokens."""
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((batch, length, case.config.hidden_size))
    return hidden, rng.integers(case.config.vocab_size, size=(batch, length))


def assert_close(ours, reference):
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-10 * np.abs(reference).max())


@pytest.mark.parametrize("seed", range(4))
def test_head_equals_the_step_in_numpy(make_case, run, seed):
    case = make_case(seed)
    hidden, tokens = draw(case, seed, batch=3)
    position = np.arange(37)
    mask = np.stack([position >= 0, position >= 7, (position >= 2) & (position < 30)])
    hidden[~mask] = np.nan
    output = run(case, hidden, tokens, mask)
    logits = head_logits(output, case.arrays["lm_head"])
    for row, real in enumerate(mask):
        expected = case.reference(hidden[row][real], tokens[row][real])
        assert_close(output[row][real], expected)
        assert_close(logits[row][real], case.reference.logits(expected))


def test_float32_head_is_as_near_to_the_truth_as_float32_allows(make_case, run):
    case = make_case(0)
    hidden, tokens = draw(case, 0)
    arrays = {path: array.astype(np.float32) for path, array in case.arrays.items()}
    output = run(case.of(case.config, arrays), hidden.astype(np.float32), tokens)
    assert output.dtype == np.float32
    truth = case.reference(hidden[0].astype(np.float32), tokens[0])
    assert np.linalg.norm(output[0] - truth) < 2e-6 * np.linalg.norm(truth)


def test_first_half_of_eh_proj_sees_the_token_and_the_second_the_hidden_state(make_case, run):
    case = make_case(0)
    hidden, tokens = draw(case, 0)
    other_hidden, other_tokens = draw(case, 1)
    eye = np.eye(case.config.hidden_size)
    tokens_only = case.with_arrays(eh_proj=np.concatenate([eye, 0 * eye], axis=1))
    hidden_only = case.with_arrays(eh_proj=np.concatenate([0 * eye, eye], axis=1))

    output = run(tokens_only, hidden, tokens)
    np.testing.assert_array_equal(run(tokens_only, other_hidden, tokens), output)
    assert np.abs(run(tokens_only, hidden, other_tokens) - output).max() > 0.1

    output = run(hidden_only, hidden, tokens)
    np.testing.assert_array_equal(run(hidden_only, hidden, other_tokens), output)
    assert np.abs(run(hidden_only, other_hidden, tokens) - output).max() > 0.1


def test_pair_sees_no_later_pair(make_case, run):
    case = make_case(0)
    hidden, tokens = draw(case, 0)
    before = run(case, hidden, tokens)
    hidden[:, 20] *= 2
    tokens[:, 21:] = (tokens[:, 21:] + 1) % case.config.vocab_size
    after = run(case, hidden, tokens)
    np.testing.assert_array_equal(after[:, :20], before[:, :20])
    assert np.all(np.any(after[:, 20:] != before[:, 20:], axis=-1))


def test_first_embedding_is_zeroed_only_when_asked_for(make_case, run):
    case = make_case(1)
    hidden, tokens = draw(case, 1)
    mask = np.arange(37)[None] >= 3
    zeroed = case.with_arrays()
    zeroed.model.mtp.zero_first_embedding = True
    pairs = case.reference.pairs(hidden[0, 3:], tokens[0, 3:])
    half = case.config.hidden_size
    normed = case.reference.norm(hidden[0, 3], "hnorm")
    pairs[0] = case.reference["eh_proj"][:, half:] @ normed
    expected = np.stack([case.reference.step(pairs, t) for t in range(34)])
    assert_close(run(zeroed, hidden, tokens, mask)[0, 3:], expected)


def test_layer_is_one_stream_with_plain_residuals_whatever_hc_mult(make_case):
    case = make_case(0, hc_mult=4)
    assert not [path for path in case.arrays if path.startswith("mtp.") and "_hc" in path]
    hidden, tokens = draw(case, 0)
    names = []

    @jax.jit
    def trace(mtp, *inputs):
        sites = {}
        mtp(*inputs, record=sites.__setitem__)
        names.extend(sites)
        return sites

    embedded = case.arrays["embed_tokens"][tokens]
    sites = trace(case.model.mtp, hidden, embedded, np.ones(tokens.shape, bool))
    plan = case.model.skeleton.residual_plan(case.model.skeleton.mtp)
    assert tuple(name for name in names if name in plan) == plan
    assert_close(sites["attn.add"], sites["pair"] + sites["attn.dsa"])
    assert_close(sites["ffn.add"], sites["attn.add"] + sites["ffn.moe"])


def test_last_token_changes_the_last_pair_alone(make_case, run):
    one_layer = {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]}
    case = make_case(0, num_hidden_layers=1, indexer_types=["full"], **one_layer)
    tokens = np.random.default_rng(3).integers(case.config.vocab_size, size=(1, 38))
    changed = tokens.copy()
    changed[0, -1] = (changed[0, -1] + 1) % case.config.vocab_size

    @jax.jit
    def trunk(model, tokens):
        return model.advance(tokens, model.init_cache(1, 38))[0]

    def outputs(tokens):
        # The last token has no token after it: there is one pair fewer.
        return run(case, np.asarray(trunk(case.model, tokens))[:, :-1], tokens[:, 1:])

    before, after = outputs(tokens), outputs(changed)
    np.testing.assert_array_equal(after[:, :-1], before[:, :-1])
    assert np.abs(after[:, -1] - before[:, -1]).max() > 1e-3
