"""Random small models and batches, on which ours and the oracle are compared.

Everything is drawn: the geometry, and every parameter, also those that initialise to 0 or 1, at a
scale where each changes the logits. Torch is needed by `randomize` and `write_checkpoint` only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from glm5_jax.numerics.oracle import Oracle

Rng = np.random.Generator

# Parameters stored as float32 in a released file; all others are drawn on bfloat16's grid, so that
# one checkpoint means the same weights in every dtype.
FLOAT32_ON_DISK = re.compile(r"(A_log|dt_bias|e_score_correction_bias|_hc\.base|_hc\.scale)$")


def random_config(seed: int | Rng) -> dict[str, Any]:
    """A `config.json` dictionary of a small random model: 2-5 layers, at least 12 index heads.

    Two limits are the oracle's. It hands a choice of tokens only to the very next layer, so a DSA
    layer is "shared" only right after a full one; and it decides ties arbitrarily, which few index
    heads (dead pools that all score 0) make common.
    """
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 6))
    mixers = ["dsa" if rng.random() < 0.45 else "kda" for _ in range(layers)]
    if "dsa" not in mixers:
        mixers[int(rng.integers(layers))] = "dsa"
    indexers: list[str] = []
    for i, mixer in enumerate(mixers):
        after_full = i > 0 and mixers[i - 1] == "dsa" and indexers[i - 1] == "full"
        choices = ["full", "shared"] if mixer == "kda" or after_full else ["full"]
        indexers.append(str(rng.choice(choices)))
    groups = int(rng.choice([1, 1, 2, 3]))
    per_group = int(rng.integers(2, 6)) if groups > 1 else int(rng.integers(4, 13))
    topk_group = int(rng.integers(1, groups + 1))
    kpool = int(rng.choice([1, 2, 4]))
    heads = int(rng.integers(1, 5))
    bounded = bool(rng.random() < 0.7)
    text = {
        "vocab_size": int(rng.integers(160, 240)),
        "hidden_size": int(rng.integers(16, 49)),
        "intermediate_size": int(rng.integers(8, 41)),
        "moe_intermediate_size": int(rng.integers(4, 17)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": int(rng.integers(6, 21)),
        "kv_lora_rank": int(rng.integers(6, 21)),
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": int(rng.integers(3, 13)),
        "v_head_dim": int(rng.integers(3, 13)),
        "n_routed_experts": groups * per_group,
        "n_shared_experts": int(rng.integers(1, 3)),
        "num_experts_per_tok": int(rng.integers(1, min(5, topk_group * per_group + 1))),
        "n_group": groups,
        "topk_group": topk_group,
        "norm_topk_prob": bool(rng.random() < 0.6),
        "routed_scaling_factor": float(rng.choice([1.0, 2.5])),
        "rms_norm_eps": float(rng.choice([1e-5, 1e-6, 1e-3])),
        "swiglu_limit": float(rng.choice([0.5, 1.0, 2.0, 10.0])),
        "hidden_act": "silu",
        "attention_bias": False,
        "index_n_heads": int(rng.integers(12, 25)),
        "index_head_dim": int(rng.integers(4, 13)),
        "index_topk": kpool * int(rng.integers(1, 7)),
        "index_kpool": kpool,
        "index_kpool_always_select_tail": bool(rng.random() < 0.7),
        "hc_mult": int(rng.integers(2, 5)),
        "hc_eps": float(rng.choice([1e-6, 1e-4, 1e-2])),
        "hc_sinkhorn_iters": int(rng.choice([1, 2, 3, 5, 20])),
        "layer_types": [
            "linear_attention"
            if mixer == "kda"
            else str(rng.choice(["deepseek_sparse_attention", "full_attention"]))
            for mixer in mixers
        ],
        "mlp_layer_types": [str(rng.choice(["dense", "sparse"], p=[0.35, 0.65])) for _ in mixers],
        "indexer_types": indexers,
        "linear_attn_config": {
            "num_heads": int(rng.integers(1, 5)),
            "head_dim": int(rng.integers(4, 17)),
            "short_conv_kernel_size": int(rng.integers(2, 5)),
            "safe_gate": bounded,
            "gate_lower_bound": -5.0 if bounded else None,
        },
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "pad_token_id": None,
        "eos_token_id": [1, 2],
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 2,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": text["hidden_size"],
        "intermediate_size": 12,
        "projection_intermediate_size": 12,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
    }


def random_batch(
    config: dict[str, Any],
    seed: int | Rng,
    *,
    max_length: int = 150,
    max_batch: int = 3,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens [B, T] int32 and a mask [B, T] int32 or None: length 1 to `max_length`.

    Most batches have left padding, and some of those right padding as well.
    Where the first layer is DSA a row repeats no token: before any state, equal tokens have equal
    index keys, and pools of them tie.
    """
    rng = np.random.default_rng(seed)
    text = config["text_config"]
    batch = int(rng.integers(1, max_batch + 1))
    # Half of them short (few pools, partial chunks), half long (sparse choices, several chunks).
    longest = max_length if rng.random() < 0.5 else min(max_length, 24)
    length = 1 if rng.random() < 0.05 else int(rng.integers(1, longest + 1))
    repeats = text["layer_types"][0] == "linear_attention"
    rows = [rng.choice(text["vocab_size"], size=length, replace=repeats) for _ in range(batch)]
    tokens = np.stack(rows).astype(np.int32)
    # The oracle drops the mask of a one-token batch, so that padding starts at two.
    if length == 1 or rng.random() < 0.3:
        return tokens, None
    first = rng.integers(0, length, size=(batch, 1))
    end = length if rng.random() < 0.6 else rng.integers(first + 1, length + 1)
    position = np.arange(length)
    return tokens, ((position >= first) & (position < end)).astype(np.int32)


def randomize(model: Oracle, seed: int | Rng, *, bias_offset: float = 0.0) -> Oracle:
    """Draw every parameter and buffer of an oracle anew, in place; returns the model.

    The scales keep every activation near unit size through the layers, so that no softmax or
    sigmoid saturates, clamps and gates bite, decays range from fast to slow, and the logits have a
    standard deviation of a few units. `bias_offset` shifts the correction bias (the release has
    about 7: choices then hang on its last bits).
    """
    import torch

    rng = np.random.default_rng(seed)
    lower_bound = model.config.text_config.linear_lower_bound
    persistent = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name in sorted(persistent):
            tensor = persistent[name]
            value = _draw(rng, name, tuple(tensor.shape), lower_bound, bias_offset)
            if FLOAT32_ON_DISK.search(name) is None:
                value = value.astype(ml_dtypes.bfloat16)
            tensor.copy_(torch.tensor(value.astype(np.float32)))
    return model


def write_checkpoint(
    model: Oracle,
    directory: str | Path,
    *,
    naming: str = "saved",
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write a float32 oracle with `save_pretrained`; returns the directory.

    `naming="saved"` is transformers' default (the released names), `"native"` its module names with
    fused experts and conv. `dtype="bfloat16"` stores what a bfloat16 model would: float32 for what
    transformers keeps so, bfloat16 for the rest (exact on `randomize`d weights).
    """
    import torch

    from glm5_jax.numerics.oracle import quiet

    if naming not in ("saved", "native"):
        raise ValueError(f"naming: expected 'saved' or 'native', got {naming!r}")
    directory = Path(directory)
    original = naming == "saved"
    layout = {"save_original_format": original, "max_shard_size": max_shard_size}
    with quiet():
        model.save_pretrained(str(directory), **layout)
        if dtype != "float32":
            narrow = type(model).from_pretrained(str(directory), dtype=getattr(torch, dtype))
            for stale in directory.iterdir():
                stale.unlink()
            narrow.save_pretrained(str(directory), **layout)
    return directory


def _draw(
    rng: Rng, name: str, shape: tuple[int, ...], lower_bound: float | None, bias_offset: float
) -> np.ndarray:
    for pattern, draw in _SCALES:
        if re.search(pattern, name):
            return draw(rng, shape)
    if name.endswith("dt_bias"):
        # Slow to fast: exp(g) from 0.1 to 0.97 a token under either form of the gate.
        low, high = (-5.0, 0.5) if lower_bound is not None else (-4.0, 1.5)
        return rng.uniform(low, high, shape)
    if name.endswith("e_score_correction_bias"):
        return bias_offset + rng.normal(0.0, 0.15, shape)
    return _matrix()(rng, shape)


def _around(mean: float, spread: float) -> Callable[[Rng, tuple[int, ...]], np.ndarray]:
    return lambda rng, shape: mean + spread * rng.standard_normal(shape)


def _matrix(gain: float = 1.0, rows: int = -1) -> Callable[[Rng, tuple[int, ...]], np.ndarray]:
    return lambda rng, shape: rng.standard_normal(shape) * gain / math.sqrt(shape[rows])


# What each parameter is drawn from, by the end of its name in the oracle; first match. Matrices
# that are not here keep unit variance.
_SCALES: list[tuple[str, Callable[[Rng, tuple[int, ...]], np.ndarray]]] = [
    (r"^model\.visual\.", _around(0.0, 0.1)),
    (r"embed_tokens\.weight$", _around(0.0, 1.0)),
    (r"lm_head\.weight$", _matrix(2.0)),
    (r"(norm|layernorm)\.weight$", _around(1.0, 0.25)),
    (r"k_norm\.bias$", _around(0.0, 0.4)),
    (r"_hc\.fn$", _matrix(1.0)),
    (r"_hc\.base$", _around(0.0, 0.7)),
    (r"_hc\.scale$", _around(1.0, 0.3)),
    (r"index_kpool_compress_ape$", _around(0.0, 1.0)),
    (r"index_kpool_compress_gate$", _matrix(1.5)),
    (r"conv1d\.weight$", _around(0.0, 0.6)),
    (r"A_log$", _around(0.0, 0.5)),
    (r"(gate_proj|up_proj)(\.weight)?$", _matrix(1.5)),
    (r"experts\.gate_up_proj$", _matrix(1.5)),
    (r"mlp\.gate\.weight$", _matrix(1.0)),
]
