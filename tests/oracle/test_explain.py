"""Each mistake of the catalogue, made by transformers: `compare` finds where, `explain` which."""

import copy
import json

import numpy as np
import pytest

import glm5_jax
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.numerics.explain import explain
from glm5_jax.numerics.mistakes import MISTAKES
from glm5_jax.numerics.oracle import build_oracle, oracle_model, trace_transformers
from glm5_jax.numerics.random_models import randomize, write_checkpoint
from glm5_jax.numerics.tracing import trace

from .plants import PLANTS, Kinds

torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
pytest.importorskip("transformers.models.glm5_next", reason="the oracle extra is not installed")

# Two layers with a part of every kind. An eps, a bound or an iteration more or less has to matter,
# so they are large, small and few.
CHANGES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-3,
    "hc_eps": 1e-2,
    "hc_sinkhorn_iters": 3,
    "swiglu_limit": 1.0,
    "n_group": 4,
    "topk_group": 2,
}
# By the end of a parameter's name: a scale at which the eps of the norm behind it matters.
SHRINK = {"indexer.wk.weight": 3e-3, "conv1d.weight": 0.03}
# The padding is no whole number of pools of 4, so that it shifts them; the tokens behind it are.
LENGTH, PADDING = 46, 6
# An eps beside squares that are not small enough for bfloat16 to show it.
WITHIN_BFLOAT16 = ("l2_eps_as_a_floor", "l2_eps_of_a_mean")
SEEDS = 20


def config():
    raw = json.loads(packaged_config("tiny").read_text())
    raw["text_config"] |= CHANGES
    del raw["text_config"]["first_k_dense_replace"]
    return raw


def batch(seed):
    tokens = np.random.default_rng(seed).integers(
        0, config()["text_config"]["vocab_size"], (2, LENGTH)
    )
    mask = np.ones(tokens.shape, bool)
    mask[1, :PADDING] = False
    return tokens, mask


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Ours, theirs in two precisions, and our trace."""
    theirs = randomize(build_oracle(config()), 0, bias_offset=7.0)
    with torch.no_grad():
        for name, tensor in theirs.state_dict(keep_vars=True).items():
            for ending, factor in SHRINK.items():
                if name.endswith(ending):
                    tensor *= factor
    directory = write_checkpoint(theirs, tmp_path_factory.mktemp("model"))
    ours = glm5_jax.load(directory, dtype="float32")
    by_dtype = {"float32": theirs, "bfloat16": oracle_model(directory, "bfloat16")}
    return ours, by_dtype, trace(ours, *batch(0))


def planted_trace(model, name, monkeypatch):
    model = copy.deepcopy(model)
    PLANTS[name].make(Kinds(model), monkeypatch)
    return trace_transformers(model, *batch(0))


def test_every_mistake_has_its_counterpart():
    assert PLANTS.keys() == MISTAKES.keys()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found_and_named(engines, name, monkeypatch):
    ours, theirs, right = engines
    found = explain(ours, right, planted_trace(theirs["float32"], name, monkeypatch))
    assert found.divergence == PLANTS[name].site
    assert found.named == (name,)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named_in_bfloat16_unless_its_rounding_hides_it(engines, name, monkeypatch):
    ours, theirs, right = engines
    wrong = planted_trace(theirs["bfloat16"], name, monkeypatch)
    found = explain(ours, right, wrong)
    if found.ok:  # too little for all sites to tell; each part by itself can
        found = explain(ours, right, wrong, site="final.head")
    assert found.named == (() if name in WITHIN_BFLOAT16 else (name,))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_without_a_mistake_none_is_named(seed, tmp_path):
    theirs = randomize(build_oracle(config()), seed)
    ours = glm5_jax.load(write_checkpoint(theirs, tmp_path), dtype="float32")
    right = trace(ours, *batch(seed))
    for dtype in ("float32", "bfloat16"):
        other = trace_transformers(oracle_model(tmp_path, dtype), *batch(seed))
        assert explain(ours, right, other).ok
        # Whatever `compare` says: each part by itself gives theirs, but for rounding.
        found = explain(ours, right, other, site="final.head")
        assert found.part is None and not found.named
