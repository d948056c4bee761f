"""Parity would not hold by accident: every planted mistake breaks it by a wide margin."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

import glm5_jax
from glm5_jax.checkpoint.tiny import packaged_config
from glm5_jax.model import TextModel
from glm5_jax.nn.norms import gated_rms_norm
from glm5_jax.nn.padding import mask_padding
from glm5_jax.numerics.choices import discrete_gaps
from glm5_jax.numerics.mistakes import MISTAKES, planted
from glm5_jax.numerics.oracle import build_oracle, oracle_model, oracle_sites
from glm5_jax.numerics.random_models import randomize, write_checkpoint

torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
pytest.importorskip("transformers.models.glm5_next", reason="the oracle extra is not installed")

TOLERANCE = 1e-10  # of the logits' scale
WIDE = 1e-6
# One layer each, small enough to compile for every mistake. An eps, a bound or an iteration more
# or less has to matter, so they are large, small and few.
COMMON = {
    "num_hidden_layers": 1,
    "indexer_types": ["full"],
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-3,
    "hc_eps": 1e-2,
    "hc_sinkhorn_iters": 3,
    "swiglu_limit": 1.0,
}
LAYERS = {
    "kda": {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]},
    "dsa": {
        "layer_types": ["deepseek_sparse_attention"],
        "mlp_layer_types": ["sparse"],
        "n_group": 4,
        "topk_group": 2,
    },
}
# By the end of a parameter's name: a scale at which the eps of the norm behind it matters.
SHRINK = {"indexer.wk.weight": 3e-3, "conv1d.weight": 0.03}


run = jax.jit(TextModel.__call__)


@dataclasses.dataclass(frozen=True)
class Judged:
    """A model of one layer, a batch, and the oracle's logits of its real tokens."""

    model: TextModel
    tokens: np.ndarray
    mask: np.ndarray
    truth: np.ndarray

    def error(self) -> float:
        """How far our logits are from the oracle's, as a part of their scale."""
        logits = np.asarray(run(self.model, self.tokens, self.mask))[self.mask]
        return float(np.abs(logits - self.truth).max() / np.abs(self.truth).max())


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    def make(layer):
        raw = json.loads(packaged_config("tiny").read_text())
        raw["text_config"] |= COMMON | LAYERS[layer]
        del raw["text_config"]["first_k_dense_replace"]
        model = randomize(build_oracle(raw), 0, bias_offset=7.0)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                for ending, factor in SHRINK.items():
                    if name.endswith(ending):
                        tensor *= factor
        directory = write_checkpoint(model, tmp_path_factory.mktemp(layer))
        # No token twice in a row: equal tokens would make equal pools in a first layer. As many as
        # DSA attends to in its masked form: some mistakes are made in that.
        rng = np.random.default_rng(0)
        tokens = np.stack([rng.permutation(raw["text_config"]["vocab_size"])[:44] for _ in "ab"])
        mask = np.ones(tokens.shape, bool)
        mask[1, :6] = False
        sites = oracle_sites(oracle_model(directory, "float64"), tokens, mask)
        assert all(gap.relative > 1e-9 for gap in discrete_gaps(sites, mask).values())
        ours = glm5_jax.load(directory, dtype="float64")
        return Judged(ours, tokens, mask, sites["final.head"][mask])

    return {layer: make(layer) for layer in LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_parity_holds_without_a_mistake(judged, layer):
    assert judged[layer].error() < TOLERANCE


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_breaks_parity(judged, name):
    mistake = MISTAKES[name]
    step = mistake.step
    is_of_kda = "kda" in step.__module__ or step in (gated_rms_norm, mask_padding)
    with planted(name):
        assert judged["kda" if is_of_kda else "dsa"].error() > WIDE


def test_mistake_lasts_as_long_as_its_context(judged):
    def ours():
        modules = [m for n, m in sys.modules.items() if n.startswith(("glm5_jax.", "pallas_"))]
        return [{key: id(value) for key, value in vars(m).items()} for m in modules]

    before = ours()
    assert judged["dsa"].error() < TOLERANCE  # compiled without it, and to be compiled again
    with pytest.raises(ZeroDivisionError), planted("tail_dropped") as mistake:
        assert mistake.step.__name__ == "select_tokens"
        assert ours() != before
        assert judged["dsa"].error() > WIDE
        raise ZeroDivisionError
    assert ours() == before
    assert judged["dsa"].error() < TOLERANCE


def test_unknown_mistake_is_a_key_error():
    with pytest.raises(KeyError, match="no_such"), planted("no_such"):
        pass
