"""The fields of a `glm5_next` config.json, as tables: what is read, demanded, and ignored.

Defaults are those of transformers' `Glm5NextTextConfig` and `Glm5NextVisionConfig` (5.24); a field
which transformers does not have at all says so beside its default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError


def shown(value: Any) -> str:
    """Write a value for a one-line message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # false for NaN
    )


KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive integer": lambda v: _is_int(v) and v > 0,
    "an integer from 1 to 65536": lambda v: _is_int(v) and 1 <= v <= 65536,
    "a non-negative integer": lambda v: _is_int(v) and v >= 0,
    "a positive number": lambda v: _is_finite(v) and v > 0,
    "a negative number or null": lambda v: v is None or (_is_finite(v) and v < 0),
    "true or false": lambda v: isinstance(v, bool),
}


@dataclass(frozen=True)
class Field:
    """A value that `ModelConfig` or `VisionConfig` reads: its kind (a key of `KINDS`), default."""

    kind: str
    default: int | float | bool | None


def _dim(default: int) -> Field:
    return Field("a positive integer", default)


def _count(default: int) -> Field:
    """Of things that are listed one by one."""
    return Field("an integer from 1 to 65536", default)


def _positive(default: float) -> Field:
    return Field("a positive number", default)


def _flag(default: bool) -> Field:
    return Field("true or false", default)


TEXT_FIELDS: dict[str, Field] = {
    "vocab_size": _dim(154880),
    "hidden_size": _dim(4096),
    "num_hidden_layers": _count(45),
    "intermediate_size": _dim(12288),
    "moe_intermediate_size": _dim(2048),
    "num_attention_heads": _dim(64),
    "q_lora_rank": _dim(1536),
    "kv_lora_rank": _dim(512),
    "qk_nope_head_dim": _dim(256),
    "v_head_dim": _dim(256),
    "n_routed_experts": _count(288),
    "n_shared_experts": _dim(1),
    "num_experts_per_tok": _dim(8),
    "n_group": _dim(1),
    "topk_group": _dim(1),
    "norm_topk_prob": _flag(True),
    "routed_scaling_factor": _positive(2.5),
    "rms_norm_eps": _positive(1e-5),
    "swiglu_limit": _positive(10.0),
    "index_n_heads": _dim(32),
    "index_head_dim": _dim(128),
    "index_topk": _dim(2048),
    "index_kpool": _dim(16),  # the release has 4
    "index_kpool_always_select_tail": _flag(True),
    "index_share_for_mtp_iteration": _flag(False),  # not in transformers: it has no MTP
    "linear_num_heads": _dim(64),
    "linear_head_dim": _dim(128),
    "linear_conv_kernel_dim": _dim(4),
    "linear_lower_bound": Field("a negative number or null", -5.0),
    "hc_mult": _dim(4),
    "hc_eps": _positive(1e-6),
    "hc_sinkhorn_iters": _dim(20),
    "num_nextn_predict_layers": Field("a non-negative integer", 0),  # not in transformers: no MTP
    "max_position_embeddings": _dim(1048576),
}
DEFAULT_PAD_TOKEN_ID = 154820
DEFAULT_DENSE_LAYERS = 3

VISION_FIELDS: dict[str, Field] = {
    "depth": _count(24),
    "hidden_size": _dim(1024),
    "num_heads": _dim(16),
    "in_channels": _dim(3),
    "patch_size": _dim(14),
    "temporal_patch_size": _dim(2),
    "spatial_merge_size": _dim(2),
    "out_hidden_size": _dim(1536),
    "intermediate_size": _dim(4096),
    "projection_intermediate_size": _dim(10240),
}

# Second names that transformers gives the same field: its attribute_map, its old dtype.
TEXT_ALIASES = {"num_local_experts": "n_routed_experts", "torch_dtype": "dtype"}
VISION_ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}

# The keys of linear_attn_config that mean the same as a flat linear_* field.
LINEAR_ATTN_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
LINEAR_ATTN_OTHER = frozenset({"safe_gate", "kda_layers", "full_attn_layers"})

# Forms from which one thing is derived, the strongest first. A member given inside text_config
# beats every member of its form at the top level.
FORMS: tuple[tuple[str, ...], ...] = (
    ("mlp_layer_types", "first_k_dense_replace"),
    ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
)


@dataclass(frozen=True)
class Only:
    """A field with one value in this family; any other is a different model."""

    value: Any
    why: str


TEXT_ONLY: dict[str, Only] = {
    "qk_rope_head_dim": Only(0, "the text model has no positions (NoPE)"),
    "attention_bias": Only(False, "no attention projection of this family has a bias"),
    "hidden_act": Only("silu", "every MLP is a clamped SwiGLU"),
    "scoring_func": Only("sigmoid", "the router scores with a sigmoid"),
    "topk_method": Only("noaux_tc", "experts are chosen by score plus correction bias"),
    "moe_router_dtype": Only("float32", "the router is computed in float32"),
    "moe_layer_freq": Only(1, "mlp_layer_types says which layers are MoE"),
    "mhc": Only(True, "every text layer has hyper-connections"),
    "mla_use_nope": Only(True, "the text model has no positions (NoPE)"),
    "index_kpool_compress": Only(True, "the indexer scores gated pools of tokens"),
    "tie_word_embeddings": Only(False, "the lm_head is a matrix of its own"),
    "is_encoder_decoder": Only(False, "this is a decoder"),
}
VISION_ONLY: dict[str, Only] = {
    "attention_bias": Only(True, "the vision tower's projections have biases"),
    "model_type": Only("glm5_next_vision", "this is the family's vision tower"),
}

# Read by parse_config itself, each with its own rules.
TEXT_SPECIAL = frozenset(
    {
        "layer_types",
        "linear_attn_config",
        "mlp_layer_types",
        "first_k_dense_replace",
        "indexer_types",
        "index_topk_pattern",
        "index_topk_freq",
        "index_skip_topk_offset",
        "num_key_value_heads",
        "qk_head_dim",
        "head_dim",
        "pad_token_id",
        "eos_token_id",
        "dtype",
        "quantization_config",
    }
)

# Written by transformers into any config; none changes what a forward pass computes.
GENERIC_IGNORED = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_experts_implementation",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attn_implementation",
        "auto_map",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "prefix",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "use_cache",
        "use_return_dict",
    }
)
TEXT_IGNORED = GENERIC_IGNORED | {
    # training only
    "attention_dropout",
    "aux_loss_alpha",
    "output_router_logits",
    "pretraining_tp",
    "router_aux_loss_coef",
    "seq_aux",
    # how another engine runs it
    "ep_size",
    # rotary settings: without rotary dims there is nothing to rotate
    "indexer_rope_interleave",
    "partial_rotary_factor",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    # token ids that the text model never looks at
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "image_end_token_id",
    "image_start_token_id",
    "image_token_id",
    "mask_token_id",
    "sep_token_id",
    "unk_token_id",
    "video_end_token_id",
    "video_start_token_id",
    "video_token_id",
    # sampling defaults
    "do_sample",
    "max_length",
    "max_new_tokens",
    "min_length",
    "temperature",
    "top_k",
    "top_p",
}
# The tower is carried and never run here: of its arithmetic only the shapes matter.
VISION_IGNORED = GENERIC_IGNORED | {
    "attention_dropout",
    "dtype",
    "hidden_act",
    "image_size",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "swiglu_limit",
    "torch_dtype",
}


def resolve_aliases(
    level: Mapping[str, Any], aliases: Mapping[str, str], source: str
) -> dict[str, Any]:
    """Copy `level` with every second name replaced by the first; ConfigError if the two differ."""
    fields = dict(level)
    for alias, name in aliases.items():
        value = fields.pop(alias, None)
        if value is None:
            continue
        if fields.get(name) is not None and fields[name] != value:
            raise ConfigError(
                f"{source}: {alias}={shown(value)} and {name}={shown(fields[name])} name the same "
                f"thing and differ; keep one of them"
            )
        fields[name] = value
    return fields


def check_kind(field: Field, value: Any, source: str, name: str) -> None:
    """ConfigError if `value` is not of the field's kind; `name` is as the file spells it."""
    if not KINDS[field.kind](value):
        raise ConfigError(f"{source}: {name} must be {field.kind}, got {shown(value)}")


def read_fields(
    given: Mapping[str, Any], table: Mapping[str, Field], source: str, prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Values of every field in `table`, checked, and the names of those that took their default."""
    values: dict[str, Any] = {}
    defaulted: list[str] = []
    for name, field in table.items():
        if name not in given:
            values[name] = field.default
            defaulted.append(prefix + name)
            continue
        value = given[name]
        check_kind(field, value, source, prefix + name)
        # 10 and 10.0 must give the same config, bit for bit.
        number = isinstance(field.default, float) and value is not None
        values[name] = float(value) if number else value
    return values, defaulted


def demand(
    given: Mapping[str, Any], table: Mapping[str, Only], source: str, prefix: str = ""
) -> None:
    """ConfigError if a field of `table` is given with another value than its only one."""
    for name, only in table.items():
        if name not in given:
            continue
        value = given[name]
        if type(value) is not type(only.value) or value != only.value:
            raise ConfigError(
                f"{source}: {prefix}{name} must be {only.value!r}, got {shown(value)}: {only.why}; "
                f"such a model is not of this family"
            )


def refuse_unknown(
    given: Mapping[str, Any], known: frozenset[str], source: str, prefix: str = ""
) -> None:
    """ConfigError naming the first field that no table knows."""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{source}: unknown field {prefix}{name}={shown(given[name])}, which could change "
                f"the arithmetic; remove it if it does not"
            )
