"""Writes tests/golden/parity from the transformers oracle: `python tests/golden/generate.py`.

Each folder is a small random model as transformers saves it; the file of its name beside it holds
tokens, mask, the float64 logits at real positions, and what each layer's sublayers gave and chose.
Needs the `oracle` extra; tests read the files without it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from glm5_jax.numerics.choices import has_tie
from glm5_jax.numerics.oracle import build_oracle, oracle_model, oracle_sites
from glm5_jax.numerics.random_models import random_config, randomize, write_checkpoint

KDA, DSA, FULL = "linear_attention", "deepseek_sparse_attention", "full_attention"

# Small enough to commit; every dimension of its own, so that a transposed axis cannot hide.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 22,
    "intermediate_size": 30,
    "moe_intermediate_size": 9,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "v_head_dim": 7,
    "index_n_heads": 12,
    "index_head_dim": 8,
}

MODELS: dict[str, dict[str, Any]] = {
    # The release in small: bounded gate, kpool 4 with tail, first layer dense, 20 Sinkhorn steps.
    "released_shape": {
        "seed": 1,
        "naming": "saved",
        "dtype": "bfloat16",
        "shard": "5GB",
        "text": {
            "layer_types": [KDA, KDA, KDA, DSA, KDA],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
            "indexer_types": ["full"] * 5,
            "linear_attn_config": {
                "num_heads": 2,
                "head_dim": 11,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
            },
            "hc_mult": 4,
            "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 20,
            "rms_norm_eps": 1e-5,
            "index_kpool": 4,
            "index_topk": 12,
            "index_kpool_always_select_tail": True,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 1.5,
        },
    },
    # What the release does not use: softplus gate, groups, a shared choice, no tail, no renorm.
    "softplus_groups_shared": {
        "seed": 2,
        "naming": "native",
        "dtype": "bfloat16",
        "shard": "20KB",
        "text": {
            "layer_types": [KDA, DSA, FULL, KDA],
            "mlp_layer_types": ["sparse", "sparse", "dense", "sparse"],
            "indexer_types": ["full", "full", "shared", "full"],
            "linear_attn_config": {
                "num_heads": 3,
                "head_dim": 5,
                "short_conv_kernel_size": 2,
                "safe_gate": False,
                "gate_lower_bound": None,
            },
            "hc_mult": 3,
            "hc_eps": 1e-2,
            "hc_sinkhorn_iters": 2,
            "rms_norm_eps": 1e-3,
            "index_kpool": 2,
            "index_topk": 8,
            "index_kpool_always_select_tail": False,
            "n_group": 3,
            "topk_group": 2,
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "swiglu_limit": 0.5,
        },
    },
    # DSA from the first layer on, pools of one token, everything stored in float32.
    "sparse_first": {
        "seed": 3,
        "naming": "saved",
        "dtype": "float32",
        "shard": "60KB",
        "text": {
            "layer_types": [DSA, KDA, DSA],
            "mlp_layer_types": ["sparse", "dense", "dense"],
            "indexer_types": ["full", "full", "full"],
            "linear_attn_config": {
                "num_heads": 1,
                "head_dim": 13,
                "short_conv_kernel_size": 3,
                "gate_lower_bound": -5.0,
            },
            "hc_mult": 2,
            "hc_eps": 1e-4,
            "hc_sinkhorn_iters": 1,
            "rms_norm_eps": 1e-6,
            "index_kpool": 1,
            "index_topk": 5,
            "index_kpool_always_select_tail": True,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 5,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 10.0,
        },
    },
}

# Outputs of the sublayers, and every discrete choice.
KEPT = (".kda", ".dsa", ".dense", ".moe", ".selection", ".router.experts")
LENGTH, PADDING = 38, (0, 9)


def main(destination: Path = Path(__file__).parent / "parity") -> None:
    """Write every model of MODELS anew."""
    shutil.rmtree(destination, ignore_errors=True)
    for name, recipe in MODELS.items():
        write(destination / name, recipe)
    size = sum(file.stat().st_size for file in destination.rglob("*") if file.is_file())
    print(f"{destination}: {size / 1024:.0f} KiB")


def write(directory: Path, recipe: dict[str, Any]) -> None:
    """One model with its expected numbers."""
    rng = np.random.default_rng(recipe["seed"])
    config = random_config(rng)
    config["text_config"] |= SIZES | recipe["text"]
    config["text_config"]["num_hidden_layers"] = len(recipe["text"]["layer_types"])
    config["vision_config"] |= {"hidden_size": 4, "num_heads": 1, "intermediate_size": 3}
    config["vision_config"] |= {"out_hidden_size": 6, "projection_intermediate_size": 5}
    model = randomize(build_oracle(config), rng)
    write_checkpoint(
        model,
        directory,
        naming=recipe["naming"],
        dtype=recipe["dtype"],
        max_shard_size=recipe["shard"],
    )
    (directory / "generation_config.json").unlink(missing_ok=True)

    vocabulary = config["text_config"]["vocab_size"]
    # No token twice in a row: equal tokens have equal index keys in a first DSA layer, and tie.
    tokens = np.stack([rng.permutation(vocabulary)[:LENGTH] for _ in PADDING]).astype(np.int32)
    mask = (np.arange(LENGTH) >= np.array(PADDING)[:, None]).astype(np.int32)
    sites = oracle_sites(oracle_model(directory, "float64"), tokens, mask)
    if has_tie(sites, mask, within=1e-5):
        raise SystemExit(f"{directory.name}: a choice is close enough to flip; take another seed")
    real = mask.astype(bool)
    expected = {name: value[real] for name, value in sites.items() if name.endswith(KEPT)}
    expected["logits"] = sites["final.head"][real]
    save_file(
        {name: np.ascontiguousarray(value) for name, value in expected.items()}
        | {"tokens": tokens, "mask": mask},
        directory.with_suffix(".safetensors"),
    )


if __name__ == "__main__":
    main()
