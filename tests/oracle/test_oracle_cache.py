"""Our cache in transformers' hands: the oracle goes on from it as from its own."""

import numpy as np
import pytest

import glm5_jax
from glm5_jax.numerics.oracle import build_oracle, oracle_available, oracle_logits
from glm5_jax.numerics.oracle_cache import oracle_cache, oracle_decode
from glm5_jax.numerics.random_models import random_config, randomize, write_checkpoint

if not oracle_available():
    pytest.skip("needs the oracle extra: torch and transformers", allow_module_level=True)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A random model with KDA, DSA with pools of two, and MoE: ours and the oracle, in float64."""
    config = random_config(1)
    written = randomize(build_oracle(config), 0)
    path = write_checkpoint(written, tmp_path_factory.mktemp("cache"))
    oracle = build_oracle(config, "float64")
    oracle.load_state_dict(written.state_dict())
    return glm5_jax.load(path, dtype="float64"), oracle


@pytest.mark.parametrize("seen", [1, 2, 30])
def test_the_oracle_goes_on_from_our_state(both, seen):
    model, oracle = both
    tokens = np.random.default_rng(seen).integers(model.config.vocab_size, size=(2, seen + 3))
    _, cache = model.advance(tokens[:, :seen], model.init_cache(2, 40))
    theirs = oracle_cache(oracle, cache)
    assert theirs.get_seq_length() == seen
    for n in range(seen, seen + 3):
        right = oracle_logits(oracle, tokens[:, : n + 1])[:, -1]
        found = oracle_decode(oracle, theirs, tokens[:, n])
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-10 * np.abs(right).max())


def test_what_it_cannot_hold_is_refused(both):
    model, oracle = both
    with pytest.raises(ValueError, match="rewind=2"):
        oracle_cache(oracle, model.init_cache(1, 8, rewind=2))
    mask = np.array([[1, 1], [0, 1]])
    _, uneven = model.advance(np.ones((2, 2), int), model.init_cache(2, 8), mask)
    with pytest.raises(ValueError, match=r"lengths \[2, 1\]"):
        oracle_cache(oracle, uneven)
