import numpy as np
import pytest

from glm5_jax.config import parse_config
from glm5_jax.numerics.random_models import random_batch, random_config

CONFIGS = [random_config(seed) for seed in range(200)]
TEXTS = [config["text_config"] for config in CONFIGS]


def test_seed_decides_model_and_batch():
    assert random_config(7) == random_config(7) != random_config(8)
    first, second = random_batch(CONFIGS[0], 3), random_batch(CONFIGS[0], 3)
    np.testing.assert_array_equal(first[0], second[0])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("index_kpool", {1, 2, 4}),
        ("hc_mult", {2, 3, 4}),
        ("num_hidden_layers", {2, 3, 4, 5}),
        ("norm_topk_prob", {True, False}),
        ("index_kpool_always_select_tail", {True, False}),
        ("n_shared_experts", {1, 2}),
        ("n_group", {1, 2, 3}),
        ("hc_sinkhorn_iters", {1, 2, 3, 5, 20}),
    ],
)
def test_every_value_of_a_field_is_drawn(field, values):
    assert {text[field] for text in TEXTS} == values


def test_patterns_hold_each_kind_of_layer():
    mixers = [{"linear_attention": "kda"}.get(t, "dsa") for x in TEXTS for t in x["layer_types"]]
    assert 0.3 < mixers.count("kda") / len(mixers) < 0.7
    assert all(set(x["layer_types"]) - {"linear_attention"} for x in TEXTS)
    assert {m for x in TEXTS for m in x["mlp_layer_types"]} == {"dense", "sparse"}
    bounds = {x["linear_attn_config"]["gate_lower_bound"] for x in TEXTS}
    assert bounds == {-5.0, None}


def test_shared_choice_comes_from_the_layer_just_before():
    shared = 0
    for text in TEXTS:
        kinds, indexers = text["layer_types"], text["indexer_types"]
        for i, kind in enumerate(kinds):
            if kind != "linear_attention" and indexers[i] == "shared":
                shared += 1
                assert kinds[i - 1] != "linear_attention"
                assert indexers[i - 1] == "full"
    assert shared > 20


def test_at_least_twelve_index_heads():
    assert min(text["index_n_heads"] for text in TEXTS) >= 12


def test_our_config_reads_every_one():
    for config in CONFIGS:
        parsed = parse_config(config)
        assert len(parsed.layer_types) == config["text_config"]["num_hidden_layers"]


def test_batches_are_padded_on_both_sides_and_no_row_is_empty():
    lengths, padded_alone, padded_right = set(), 0, 0
    for seed, config in enumerate(CONFIGS):
        tokens, mask = random_batch(config, seed)
        assert tokens.shape[0] in (1, 2, 3)
        assert 0 <= tokens.min() <= tokens.max() < config["text_config"]["vocab_size"]
        lengths.add(tokens.shape[1])
        if mask is not None:
            assert mask.any(axis=1).all()
            assert ((np.diff(mask, axis=1, prepend=0) == 1).sum(axis=1) == 1).all()
            padded_alone += tokens.shape[0] == 1 and not mask.all()
            padded_right += not mask[:, -1].all()
    assert min(lengths) == 1
    assert max(lengths) > 140
    assert padded_alone > 10
    assert 20 < padded_right < 100
