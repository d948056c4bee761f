"""A small model of every kind of layer, filled without a checkpoint, and modules under jit."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from glm5_jax.config import ModelConfig, parse_config
from glm5_jax.model import TextModel
from glm5_jax.specs import Leaf, leaves

# No two sizes are equal, so that a transposed axis cannot hide. Layer 3 shares the selection of
# layer 1, across the KDA layer between them.
SMALL: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 21,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 14,
    "kv_lora_rank": 11,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 0,
    "v_head_dim": 7,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "swiglu_limit": 1.5,
    "index_n_heads": 12,
    "index_head_dim": 5,
    "index_topk": 8,
    "index_kpool": 4,
    "hc_mult": 3,
    "hc_eps": 1e-4,
    "hc_sinkhorn_iters": 4,
    "layer_types": [
        "linear_attention",
        "deepseek_sparse_attention",
        "linear_attention",
        "deepseek_sparse_attention",
        "linear_attention",
    ],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "indexer_types": ["full", "full", "full", "shared", "full"],
    "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "eos_token_id": [1, 2],
}


@dataclasses.dataclass(frozen=True)
class Small:
    """A model, and its parameters as NumPy arrays by path."""

    config: ModelConfig
    arrays: dict[str, np.ndarray]
    model: TextModel

    def below(self, prefix: str) -> dict[str, np.ndarray]:
        """The float64 parameters of a module, by their paths inside it."""
        at = prefix + "."
        inside = {k.removeprefix(at): v for k, v in self.arrays.items() if k.startswith(at)}
        return {k: v.astype(np.float64) for k, v in inside.items()}

    def with_arrays(self, changed: Mapping[str, np.ndarray]) -> TextModel:
        """The model with some parameters replaced."""
        return TextModel.from_leaves(self.config, {**self.arrays, **changed})


@pytest.fixture(scope="session")
def build() -> Callable[..., Small]:
    """`build(dtype, **changes)`: the small model in a dtype, with config fields replaced."""
    return lambda dtype="float64", **changes: _build(dtype, json.dumps(changes))


@functools.cache
def _build(dtype: str, changes: str) -> Small:
    config = parse_config({**SMALL, **json.loads(changes)})
    rng = np.random.default_rng(0)
    arrays = {path: _draw(rng, leaf, dtype) for path, leaf in leaves(config).items()}
    return Small(config, arrays, TextModel.from_leaves(config, arrays))


def _draw(rng: np.random.Generator, leaf: Leaf, dtype: str) -> np.ndarray:
    *_, parent, name = f".{leaf.path}".split(".")
    values = rng.standard_normal(leaf.shape)
    if name.endswith(("norm", "norm_weight")):
        values = 1 + 0.25 * values
    elif name == "conv":
        values *= 0.6
    elif name == "dt_bias":
        values = rng.uniform(-5, 0.5, leaf.shape)
    elif name in ("A_log", "base", "k_norm_bias", "scale"):
        values = (name == "scale") + 0.5 * values
    elif (parent, name) == ("router", "bias"):
        values *= 0.15
    elif name not in ("embed_tokens", "ape"):
        values *= 1.5 / np.sqrt(leaf.shape[-1])
    values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    if dtype == "bfloat16" and (leaf.dtype == "F32" or leaf.keep_stored):
        return values
    return values.astype(dtype)


@pytest.fixture(scope="session")
def small(build) -> Small:
    """The small model in float64."""
    return build()


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    """[3, 23] token ids: five pools of four and a tail of three."""
    return np.random.default_rng(1).integers(0, SMALL["vocab_size"], (3, 23))


@pytest.fixture(scope="session")
def mask() -> np.ndarray:
    """[3, 23]: no padding, six tokens of left padding, two left and three right."""
    position = np.arange(23)
    return np.stack([position >= 0, position >= 6, (position >= 2) & (position < 20)])


@pytest.fixture(scope="session")
def hidden() -> np.ndarray:
    """[3, 23, 24] float64: the input of a mixer or a feed-forward layer."""
    return np.random.default_rng(2).standard_normal((3, 23, SMALL["hidden_size"]))
