"""`ModelConfig` → the content of a config.json, for files that say which model they are of."""

from __future__ import annotations

from typing import Any

from .config import ModelConfig
from .config_fields import TEXT_FIELDS

_LAYER_TYPES = {"kda": "linear_attention", "dsa": "deepseek_sparse_attention"}
_MLP_TYPES = {"dense": "dense", "moe": "sparse"}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What `parse_config` reads as this model; the vision tower is left out."""
    flat = [name for name in TEXT_FIELDS if not name.startswith("linear_")]
    out: dict[str, Any] = {"model_type": "glm5_next_text"}
    out |= {name: getattr(config, name) for name in flat}
    out |= {
        "linear_attn_config": {
            "num_heads": config.linear_num_heads,
            "head_dim": config.linear_head_dim,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
            "gate_lower_bound": config.linear_lower_bound,
            "safe_gate": config.linear_lower_bound is not None,
        },
        "layer_types": [_LAYER_TYPES[kind] for kind in config.layer_types],
        "mlp_layer_types": [_MLP_TYPES[kind] for kind in config.mlp_layer_types],
        "indexer_types": list(config.indexer_types),
        "pad_token_id": config.pad_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    if config.dtype is not None:
        out["dtype"] = config.dtype
    if config.quantization is not None:
        out["quantization_config"] = {"quant_method": config.quantization.method}
        if config.quantization.weight_block_size is not None:
            block = list(config.quantization.weight_block_size)
            out["quantization_config"]["weight_block_size"] = block
    return out
