"""Each module alone against the oracle's own, on the same input and weights, in float64.

A whole model that agrees could hide two mistakes that cancel, or one that its inputs never show.
Here every module of one small model per geometry gets inputs of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import glm5_jax
from glm5_jax.config import ModelConfig
from glm5_jax.model import TextModel
from glm5_jax.nn.ffn import Routing
from glm5_jax.nn.kda import causal_conv
from glm5_jax.nn.linear import linear
from glm5_jax.nn.mhc import collapse, mean_streams
from glm5_jax.nn.norms import gated_rms_norm, layer_norm, rms_norm
from glm5_jax.numerics.oracle import oracle_model, oracle_module
from pallas_kernels.kda import chunk_kda, kda_gate

torch = pytest.importorskip("torch", reason="the oracle extra is not installed")
pytest.importorskip("transformers.models.glm5_next", reason="the oracle extra is not installed")

TOLERANCE = 1e-12  # of the largest value
KDA, FULL, SHARED = 0, 1, 2  # the layers of every model here; dense, sparse, dense
LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "indexer_types": ["full", "full", "shared"],
}


def kda_sizes(heads, dim, taps, lower_bound):
    return {
        "num_heads": heads,
        "head_dim": dim,
        "short_conv_kernel_size": taps,
        "safe_gate": lower_bound is not None,
        "gate_lower_bound": lower_bound,
    }


# length, real tokens cut off on the left of each row, and the fields that are not drawn.
GEOMETRIES: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    "released": (
        70,
        [0, 5, 64],
        {
            "index_kpool": 4,
            "index_topk": 16,
            "index_kpool_always_select_tail": True,
            "n_group": 1,
            "topk_group": 1,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "linear_attn_config": kda_sizes(3, 10, 4, -5.0),
        },
    ),
    "softplus_groups_no_tail": (
        41,
        [0, 3],
        {
            "index_kpool": 2,
            "index_topk": 6,
            "index_kpool_always_select_tail": False,
            "n_group": 3,
            "topk_group": 2,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 1,
            "hc_eps": 1e-2,
            "linear_attn_config": kda_sizes(2, 7, 3, None),
        },
    ),
    "pools_of_one": (
        19,
        [0, 0, 11],
        {
            "index_kpool": 1,
            "index_topk": 5,
            "n_group": 2,
            "topk_group": 1,
            "n_routed_experts": 10,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "hc_mult": 2,
            "rms_norm_eps": 1e-3,
            "linear_attn_config": kda_sizes(1, 13, 2, -5.0),
        },
    ),
    "softplus_long": (
        134,
        [2, 0],
        {
            "index_kpool": 4,
            "index_topk": 8,
            "n_shared_experts": 2,
            "swiglu_limit": 0.5,
            "linear_attn_config": kda_sizes(4, 5, 4, None),
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """One set of weights in both engines, and inputs for their modules."""

    theirs: Any  # the oracle's text model, float64
    ours: TextModel
    mask: np.ndarray
    rng: np.random.Generator

    @property
    def text(self) -> ModelConfig:
        return self.ours.config

    def hidden(self, *inner: int) -> np.ndarray:
        """[B, T, *inner], or [B, T, X]."""
        shape = inner or (self.text.hidden_size,)
        return self.rng.standard_normal((*self.mask.shape, *shape))


@pytest.fixture(scope="module", params=GEOMETRIES)
def pair(request, random_case):
    length, padding, fields = GEOMETRIES[request.param]
    number = list(GEOMETRIES).index(request.param)
    case = random_case(1000 + number, **LAYERS, **fields)
    theirs = oracle_model(case.directory, "float64").model.language_model
    ours = glm5_jax.load(case.directory, dtype="float64")
    mask = np.arange(length) >= np.array(padding)[:, None]
    return Pair(theirs, ours, mask, np.random.default_rng(number))


def oracle(module, *args, **kwargs):
    """What a module or function of the oracle makes of arrays, as arrays."""
    args, kwargs = jax.tree.map(torch.tensor, (args, kwargs))
    with torch.no_grad():
        return jax.tree.map(np.asarray, module(*args, **kwargs))


@pytest.fixture(scope="module")
def run():
    """What a step of ours makes of arrays, compiled."""
    return lambda step, *args: jax.tree.map(np.asarray, jax.jit(step)(*args))


def assert_equal(ours, theirs):
    assert ours.dtype == theirs.dtype == np.float64
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


# ---- KDA


def test_forget_gate(pair, run):
    x, layer = pair.hidden(), pair.ours.layers[KDA].attn
    theirs = oracle(pair.theirs.layers[KDA].self_attn.forget_gate, x)

    def gate(layer, x):
        f = linear(linear(x, layer.f_a_proj[...]), layer.f_b_proj[...])
        f = f.reshape(theirs.shape)
        return kda_gate(f, layer.A_log[...], layer.dt_bias[...], pair.text.linear_lower_bound)

    assert_equal(run(gate, layer, x), theirs)


def test_short_convolution(pair, run):
    theirs = pair.theirs.layers[KDA].self_attn
    conv = pair.ours.layers[KDA].attn.conv[...]
    x = pair.hidden(len(conv))
    out = oracle(
        lambda x: oracle_module("float64").causal_conv1d_fn(
            x.transpose(1, 2), theirs.conv1d.weight.squeeze(1), activation="silu"
        ),
        x,
    )
    assert_equal(run(causal_conv, x, conv), np.swapaxes(out, 1, 2))


def test_delta_rule_from_a_state(pair, run):
    heads, dim = pair.text.linear_num_heads, pair.text.linear_head_dim
    q, k, v = (pair.hidden(heads, dim) for _ in "qkv")
    g, beta = -5 * pair.rng.random(q.shape), pair.rng.random(q.shape[:3])
    state = pair.rng.standard_normal((len(q), heads, dim, dim))
    ours = [
        run(
            lambda state, *x, name=name: chunk_kda(
                *x, initial_state=state, output_final_state=True, implementation=name
            ),
            *(state, q, k, v, g, beta),
        )
        for name in ("xla", "reference")
    ]
    for form in ("chunk", "recurrent"):
        theirs = oracle(
            getattr(oracle_module("float64"), f"{form}_kimi_delta_attention"),
            *(q, k, v),
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        for out, final in ours:
            assert_equal(out, theirs[0])
            assert_equal(final, theirs[1])


def test_output_norm_and_gate(pair, run):
    norm = pair.theirs.layers[KDA].self_attn.o_norm
    o, gate = (pair.hidden(pair.text.linear_head_dim) for _ in range(2))
    weight = pair.ours.layers[KDA].attn.o_norm[...]
    ours = run(lambda *x: gated_rms_norm(*x, pair.text.rms_norm_eps), o, gate, weight)
    assert_equal(ours, oracle(norm, o, gate))


def test_kda_mixer_with_left_padding(pair, call):
    x = pair.hidden()
    theirs = oracle(pair.theirs.layers[KDA].self_attn, x, attention_mask=pair.mask)
    ours = call(pair.ours.layers[KDA].attn, x, pair.mask)
    assert_equal(ours[pair.mask], theirs[pair.mask])


# ---- DSA


def test_indexer_chooses_the_same_tokens(pair, call):
    x, qr = pair.hidden(), pair.hidden(pair.text.q_lora_rank)
    indexer = pair.theirs.layers[FULL].self_attn.indexer
    theirs = oracle(lambda *args: indexer(*args, cache=None), x, qr, pair.mask)
    ours = call(pair.ours.layers[FULL].attn.indexer, x, qr, pair.mask)
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))
    # Some query refused what it could have chosen.
    visible = np.cumsum(pair.mask, axis=1)
    assert ((ours >= 0).sum(-1) < visible // pair.text.index_kpool * pair.text.index_kpool).any()


def test_mla_over_a_given_selection(pair, call):
    x, selection = pair.hidden(), random_selection(pair)
    theirs, *_ = oracle(
        pair.theirs.layers[SHARED].self_attn,
        x,
        attention_mask=pair.mask,
        prev_topk_indices=selection,
    )
    ours, used = call(pair.ours.layers[SHARED].attn, x, pair.mask, selection)
    np.testing.assert_array_equal(used, selection)
    assert_equal(ours, theirs)


def random_selection(pair):
    """Any tokens, in any order and number, also later ones; none for padded queries."""
    B, T = pair.mask.shape
    chosen = np.argsort(pair.rng.random((B, T, T)), axis=-1)[..., : pair.text.index_topk]
    allowed = np.take_along_axis(pair.mask[:, None] & pair.mask[..., None], chosen, axis=-1)
    allowed &= pair.rng.random(chosen.shape) < 0.7
    return np.where(allowed, chosen, -1).astype(np.int32)


def test_dsa_mixer_with_left_padding(pair, call):
    x = pair.hidden()
    theirs, _, chosen = oracle(pair.theirs.layers[FULL].self_attn, x, attention_mask=pair.mask)
    ours, selection = call(pair.ours.layers[FULL].attn, x, pair.mask)
    np.testing.assert_array_equal(np.sort(selection), np.sort(chosen))
    assert_equal(ours[pair.mask], theirs[pair.mask])


# ---- residual streams and norms


@pytest.mark.parametrize("layer", [KDA, FULL])
@pytest.mark.parametrize("site", ["attn_hc", "ffn_hc"])
def test_hyper_connection(pair, run, layer, site):
    streams = pair.hidden(pair.text.hc_mult, pair.text.hidden_size)
    theirs = oracle(getattr(pair.theirs.layers[layer], site), streams)

    def collapsed(module, streams):
        pre, post, comb = module(streams)
        return post, comb, collapse(streams, pre)

    ours = run(collapsed, getattr(pair.ours.layers[layer], site), streams)
    for one, other in zip(ours, theirs, strict=True):
        assert_equal(one, other)


def test_mean_of_the_streams(pair, run):
    streams = pair.hidden(pair.text.hc_mult, pair.text.hidden_size)
    assert_equal(run(mean_streams, streams), oracle(pair.theirs.hc_head, streams))


def test_rms_norm(pair, run):
    x, eps = pair.hidden() * 0.01, pair.text.rms_norm_eps
    ours = run(lambda x, weight: rms_norm(x, weight, eps), x, pair.ours.norm[...])
    assert_equal(ours, oracle(pair.theirs.norm, x))


def test_layer_norm_of_the_index_keys(pair, run):
    x = pair.hidden(pair.text.index_head_dim) * 0.01
    indexer = pair.ours.layers[FULL].attn.indexer
    ours = run(layer_norm, x, indexer.k_norm_weight[...], indexer.k_norm_bias[...])
    assert_equal(ours, oracle(pair.theirs.layers[FULL].self_attn.indexer.k_norm, x))


# ---- feed-forward


def test_dense_mlp(pair, call):
    x = pair.hidden()
    ours = call(pair.ours.layers[KDA].ffn, x)
    assert_equal(ours, oracle(pair.theirs.layers[KDA].mlp, x))


def test_shared_expert(pair, call):
    x = pair.hidden()
    ours = call(pair.ours.layers[FULL].ffn.shared, x)
    assert_equal(ours, oracle(pair.theirs.layers[FULL].mlp.shared_experts, x))


def test_router_chooses_and_weighs_the_same_experts(pair, call):
    x = pair.hidden()
    _, weights, experts = oracle(pair.theirs.layers[FULL].mlp.gate, x)
    ours = call(pair.ours.layers[FULL].ffn.router, x)
    shape, E = ours.experts.shape, pair.text.n_routed_experts
    ours = of_every_expert(*ours, E)
    theirs = of_every_expert(experts.reshape(shape), weights.reshape(shape), E)
    np.testing.assert_array_equal(ours != 0, theirs != 0)
    assert_equal(ours, theirs)


def of_every_expert(experts, weights, count):
    """[B, T, E], 0 where not chosen: the oracle lists a token's experts in no order."""
    spread = np.zeros((*experts.shape[:-1], count))
    np.put_along_axis(spread, experts, weights, axis=-1)
    return spread


def test_experts_of_a_given_routing(pair, call):
    x, text = pair.hidden(), pair.text
    order = np.argsort(pair.rng.random((*pair.mask.shape, text.n_routed_experts)))
    experts = order[..., : text.num_experts_per_tok]
    weights = pair.rng.standard_normal(experts.shape)
    flat = (h.reshape(-1, h.shape[-1]) for h in (x, experts, weights))
    theirs = oracle(pair.theirs.layers[FULL].mlp.experts, *flat)
    ours = call(pair.ours.layers[FULL].ffn.experts, x, Routing(experts, weights))
    assert_equal(ours, theirs.reshape(x.shape))


def test_mixture_of_experts(pair, call):
    x = pair.hidden()
    ours = call(pair.ours.layers[FULL].ffn, x)
    assert_equal(ours, oracle(pair.theirs.layers[FULL].mlp, x))
