"""Generation beside transformers' own: the same tokens, and the same narrowing of the logits."""

import numpy as np
import pytest

import glm5_jax
from glm5_jax.numerics.choices import has_tie
from glm5_jax.numerics.oracle import build_oracle, oracle_available, oracle_sites
from glm5_jax.numerics.random_models import random_config, randomize, write_checkpoint
from glm5_jax.sampling import make_sampling, narrow
from glm5_jax.token_batch import left_padded

if not oracle_available():
    pytest.skip("needs the oracle extra: torch and transformers", allow_module_level=True)

MODELS_OF_A_CONFIG = 17
NEW = 20
# By seed, with changes: three layers each, all kinds between them, 51 models with the compilations
# of three. As drawn, 27 is DSA alone, which finds ties wherever tokens repeat.
CONFIGS = {
    1: {},
    9: {},
    27: {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 2],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared"],
    },
}


def tokens_of(oracle, tokens, mask, ends):
    """transformers' own greedy tokens, up to the end of each row."""
    import torch

    with torch.no_grad():
        out = oracle.generate(
            input_ids=torch.tensor(tokens).long(),
            attention_mask=torch.tensor(mask).long(),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=list(ends),
            pad_token_id=0,
        )
    rows = out[:, tokens.shape[1] :].tolist()
    return [row[: min([row.index(e) + 1 for e in ends if e in row], default=NEW)] for row in rows]


def decided(oracle, prompts, rows):
    """Whether no choice on the way was a tie, of pools, experts, or tokens."""
    tokens, mask = left_padded([p + r for p, r in zip(prompts, rows, strict=True)])
    sites = oracle_sites(oracle, tokens, mask)
    best = -np.sort(-sites["final.head"][mask], axis=-1)
    # transformers looks for the largest logit in float32.
    return not has_tie(sites, mask) and (best[:, 0] - best[:, 1]).min() > 1e-5


@pytest.mark.parametrize("seed", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(seed, tmp_path):
    config = random_config(seed)
    config["text_config"] |= CONFIGS[seed]
    rng = np.random.default_rng(seed)
    narrow_oracle, oracle = build_oracle(config), build_oracle(config, "float64")
    drawn, judged = 0, 0
    while judged < MODELS_OF_A_CONFIG:
        drawn += 1
        assert drawn <= MODELS_OF_A_CONFIG + 1, "too many models with ties"
        randomize(narrow_oracle, rng)
        oracle.load_state_dict(narrow_oracle.state_dict())
        vocab = config["text_config"]["vocab_size"]
        prompts = [rng.integers(vocab, size=n).tolist() for n in rng.integers(1, 32, 3)]
        ends = rng.integers(vocab, size=20)  # so that some rows end early
        expected = tokens_of(oracle, *left_padded(prompts), ends)
        if not decided(oracle, prompts, expected):
            continue
        judged += 1
        path = write_checkpoint(narrow_oracle, tmp_path / f"{drawn}")
        ours = glm5_jax.generate(
            glm5_jax.load(path, dtype="float64"), prompts, max_new_tokens=NEW, eos=ends.tolist()
        )
        assert ours.rows == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 6},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 11, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 500, "top_p": 1e-3},
    ],
)
@pytest.mark.parametrize("rounded", [False, True], ids=["random", "tied"])
def test_narrowing_is_that_of_transformers(settings, rounded):
    import torch
    from transformers import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = 3 * np.random.default_rng(0).standard_normal((200, 97)).astype(np.float32)
    logits = np.round(logits) if rounded else logits
    scores = TemperatureLogitsWarper(settings["temperature"])(None, torch.tensor(logits))
    if "top_k" in settings:
        scores = TopKLogitsWarper(settings["top_k"])(None, scores)
    if "top_p" in settings:
        scores = TopPLogitsWarper(settings["top_p"])(None, scores)
    ours = np.asarray(narrow(logits, make_sampling(**settings)))
    if rounded and "top_p" in settings:
        # Which of equals goes first is nobody's business: how many stay is.
        ours, scores = np.sort(ours), scores.sort().values
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(scores.numpy()))
    # Ours are counted from the largest.
    best = scores.max(dim=-1, keepdim=True).values
    np.testing.assert_allclose(ours, (scores - best).numpy(), atol=1e-5)
