"""Weights in the layouts of the quantised releases: what those quantise, under which names.

FP8: every matrix of the DSA layers but `kv_b_proj` and the indexer, and all feed-forward matrices.
NVFP4: the routed experts alone. The router, the KDA layers, embedding and head stay plain, in the
MTP layer as in the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..specs import StoredSpec
from .codecs import encode_fp8, encode_nvfp4
from .layouts import NVFP4_GROUP, RELEASED_WORDS, Scheme

BLOCK = (128, 128)

_ROLES: dict[Scheme, frozenset[str]] = {
    "fp8": frozenset({"mla_projection", "dense_ffn", "moe_shared", "moe_expert"}),
    "nvfp4_modelopt": frozenset({"moe_expert"}),
    "nvfp4_compressed_tensors": frozenset({"moe_expert"}),
}


def is_quantized(spec: StoredSpec, scheme: Scheme) -> bool:
    """Whether the release of that layout stores a tensor quantised."""
    if not spec.quantizable or spec.role not in _ROLES[scheme]:
        return False
    return not spec.name.endswith("kv_b_proj.weight")


def quantize(
    spec: StoredSpec, weight: np.ndarray, scheme: Scheme, block: tuple[int, int] = BLOCK
) -> dict[str, np.ndarray]:
    """The tensors, by name, that a weight [out, in] becomes in a layout.

    A tensor that the layout leaves plain is given back alone, under its name. So is, for NVFP4, a
    weight whose input width is not a multiple of 16: it has no such form.
    """
    nvfp4 = scheme != "fp8"
    if not is_quantized(spec, scheme) or (nvfp4 and weight.shape[1] % NVFP4_GROUP):
        return {spec.name: weight}
    if nvfp4:
        modelopt = scheme == "nvfp4_modelopt"
        arrays = encode_nvfp4(weight, "scale_2" if modelopt else "global_scale")
    else:
        arrays = encode_fp8(weight, "block", block)
    stem = spec.name.removesuffix("weight")
    return {stem + RELEASED_WORDS[scheme][key]: array for key, array in arrays.items()}


def quantization_config(scheme: Scheme, block: tuple[int, int] = BLOCK) -> dict[str, Any]:
    """What the config.json of a release in that layout says of it."""
    if scheme == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": NVFP4_GROUP,
        "dynamic": False,
        "symmetric": True,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    plain = ["lm_head", "*.self_attn.*", "*.mlp.gate", "*.shared_experts.*", "*.eh_proj"]
    if scheme == "nvfp4_modelopt":
        own = {"quant_algo": "NVFP4", "quant_method": "modelopt"}
    else:
        weights["strategy"] = "tensor_group"
        own = {"format": "nvfp4-pack-quantized", "quant_method": "compressed-tensors"}
    return {"config_groups": {"group_0": group}, "ignore": plain, **own}
