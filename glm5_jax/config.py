"""config.json → `ModelConfig`: frozen, validated, and open about what it overrode and defaulted.

Facts and traps: the section "Config" of the design, and transformers' `configuration_glm5_next`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import config_fields as fields
from . import config_layers, config_levels
from .config_fields import shown
from .config_layers import Indexer, Mixer, Mlp
from .errors import ConfigError


@dataclass(frozen=True)
class QuantizationConfig:
    """What the file says of quantisation. The stored tensors decide; FP8 blocks come from here."""

    method: str
    weight_block_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class VisionConfig:
    """Geometry of the vision tower, which is accounted for and carried, not run."""

    depth: int
    hidden_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    intermediate_size: int
    projection_intermediate_size: int


@dataclass(frozen=True)
class ModelConfig:
    """One model of the family, in the checkpoint's own field names, flat and hashable.

    `layer_types`, `mlp_layer_types` and `indexer_types` have one entry per text layer, in our words
    (`kda`/`dsa`, `dense`/`moe`, `full`/`shared`). `overridden` says in words which given values
    lost to others, `defaulted` names the fields that were absent; neither takes part in equality.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    index_kpool_always_select_tail: bool
    index_share_for_mtp_iteration: bool
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int
    linear_lower_bound: float | None
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    layer_types: tuple[Mixer, ...]
    mlp_layer_types: tuple[Mlp, ...]
    indexer_types: tuple[Indexer, ...]
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    quantization: QuantizationConfig | None
    vision: VisionConfig | None
    overridden: tuple[str, ...] = field(default=(), compare=False)
    defaulted: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def dims(self) -> Mapping[str, int]:
        """Sizes by the letters that `specs` writes shapes in; the vision tower's begin with v."""
        dims = {
            "Vo": self.vocab_size,
            "X": self.hidden_size,
            "F": self.intermediate_size,
            "I": self.moe_intermediate_size,
            "Is": self.moe_intermediate_size * self.n_shared_experts,
            "H": self.linear_num_heads,
            "D": self.linear_head_dim,
            "K": self.linear_conv_kernel_dim,
            "A": self.num_attention_heads,
            "R": self.kv_lora_rank,
            "Rq": self.q_lora_rank,
            "N": self.qk_nope_head_dim,
            "V": self.v_head_dim,
            "HI": self.index_n_heads,
            "DI": self.index_head_dim,
            "P": self.index_kpool,
            "M": self.hc_mult,
            "E": self.n_routed_experts,
        }
        if self.vision is not None:
            dims |= {
                "vX": self.vision.hidden_size,
                "vF": self.vision.intermediate_size,
                "vH": self.vision.num_heads,
                "vC": self.vision.in_channels,
                "vT": self.vision.temporal_patch_size,
                "vP": self.vision.patch_size,
                "vM": self.vision.spatial_merge_size,
                "vO": self.vision.out_hidden_size,
                "vI": self.vision.projection_intermediate_size,
            }
        return MappingProxyType(dims)


def load_config(path: str | Path) -> ModelConfig:
    """Read a config.json, or the config.json of a directory.

    Raises ConfigError, one line that names the file and the field, if it is missing, is not JSON,
    or describes a model outside this family.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; expected a config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    return parse_config(_decode(text, str(file)), source=str(file))


def _decode(text: str, source: str) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        decoded: dict[str, Any] = {}
        for key, value in pairs:
            if key in decoded:
                raise ConfigError(f"{source}: key {key!r} occurs twice in one object; keep one")
            decoded[key] = value
        return decoded

    try:
        return json.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from None


def parse_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Build a `ModelConfig` from the decoded content of a config.json; `source` is for messages.

    The text fields may stand inside `text_config` or at the top level; inside wins.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: expected a JSON object, got {type(raw).__name__}")
    overridden: list[str] = []
    given = config_levels.merge_levels(raw, source, overridden)
    vision_raw = raw.get("vision_config")

    known = fields.TEXT_SPECIAL | fields.TEXT_IGNORED
    known |= fields.TEXT_FIELDS.keys() | fields.TEXT_ONLY.keys()
    fields.refuse_unknown(given, known, source)
    fields.demand(given, fields.TEXT_ONLY, source)
    values, defaulted = fields.read_fields(given, fields.TEXT_FIELDS, source)
    _check_arithmetic(values, given, source)

    layers = values["num_hidden_layers"]
    kinds = config_layers.layer_types(given, layers, source, overridden, defaulted)
    return ModelConfig(
        **values,
        layer_types=kinds,
        mlp_layer_types=config_layers.mlp_layer_types(given, layers, source, overridden, defaulted),
        indexer_types=config_layers.indexer_types(given, kinds, source, overridden, defaulted),
        pad_token_id=_pad_token_id(given, values["vocab_size"], source, defaulted),
        eos_token_ids=_eos_token_ids(given, source, defaulted),
        dtype=_dtype(given, source),
        quantization=_quantization(given.get("quantization_config"), source),
        vision=None if vision_raw is None else _vision(vision_raw, source, defaulted),
        overridden=tuple(overridden),
        defaulted=tuple(defaulted),
    )


def _check_arithmetic(values: Mapping[str, Any], given: Mapping[str, Any], source: str) -> None:
    """Refuse numbers that are fine alone and impossible together."""

    def refuse(problem: str) -> None:
        raise ConfigError(f"{source}: {problem}")

    heads = values["num_attention_heads"]
    kv_heads = given.get("num_key_value_heads", heads)
    if kv_heads != heads or type(kv_heads) is not int:
        refuse(f"num_key_value_heads must equal num_attention_heads={heads}, got {shown(kv_heads)}")
    nope = values["qk_nope_head_dim"]
    qk = given.get("qk_head_dim", nope)
    if qk != nope or type(qk) is not int:
        refuse(f"qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim = {nope}, got {shown(qk)}")
    head_dim = given.get("head_dim", 0)
    # transformers forces it to the rotary width, which is 0: any number is harmless.
    if head_dim is not None and not fields.KINDS["a non-negative integer"](head_dim):
        refuse(f"head_dim must be a non-negative integer, got {shown(head_dim)}")
    topk, pool = values["index_topk"], values["index_kpool"]
    if topk % pool:
        refuse(f"index_topk={topk} must be a multiple of index_kpool={pool}")
    if values["num_nextn_predict_layers"] > 1:
        refuse(
            f"num_nextn_predict_layers must be 0 or 1, got {values['num_nextn_predict_layers']}: "
            f"the family has one MTP layer"
        )
    experts, groups, kept = (values[k] for k in ("n_routed_experts", "n_group", "topk_group"))
    if experts % groups:
        refuse(f"n_routed_experts={experts} must be a multiple of n_group={groups}")
    size = experts // groups
    if groups > 1 and size < 2:
        refuse(f"n_group={groups} leaves groups of one expert; a group is scored by its best two")
    if kept > groups:
        refuse(f"topk_group={kept} must not exceed n_group={groups}")
    if values["num_experts_per_tok"] > kept * size:
        refuse(
            f"num_experts_per_tok={values['num_experts_per_tok']} exceeds the {kept * size} "
            f"experts of the topk_group={kept} chosen groups"
        )


def _pad_token_id(
    given: Mapping[str, Any], vocab: int, source: str, defaulted: list[str]
) -> int | None:
    if "pad_token_id" not in given:
        defaulted.append("pad_token_id")
        default = fields.DEFAULT_PAD_TOKEN_ID
        return default if default < vocab else None
    pad = given["pad_token_id"]
    if pad is not None and not (fields.KINDS["a non-negative integer"](pad) and pad < vocab):
        raise ConfigError(
            f"{source}: pad_token_id must be null or a token below vocab_size={vocab}, "
            f"got {shown(pad)}"
        )
    return pad


def _eos_token_ids(given: Mapping[str, Any], source: str, defaulted: list[str]) -> tuple[int, ...]:
    if "eos_token_id" not in given:
        defaulted.append("eos_token_id")
        return ()
    eos = given["eos_token_id"]
    ids = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    if not all(fields.KINDS["a non-negative integer"](token) for token in ids):
        raise ConfigError(
            f"{source}: eos_token_id must be a token or a list of tokens, got {shown(eos)}"
        )
    return ids


def _dtype(given: Mapping[str, Any], source: str) -> str | None:
    dtype = given.get("dtype")
    if dtype is not None and not isinstance(dtype, str):
        raise ConfigError(f"{source}: dtype must be a name such as bfloat16, got {shown(dtype)}")
    return dtype


def _quantization(raw: Any, source: str) -> QuantizationConfig | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: quantization_config must be an object, got {shown(raw)}")
    method = raw.get("quant_method", raw.get("quant_algo"))
    if not isinstance(method, str):
        raise ConfigError(
            f"{source}: quantization_config.quant_method must name a method, got {shown(method)}"
        )
    block = raw.get("weight_block_size")
    if block is None:
        return QuantizationConfig(method)
    positive = fields.KINDS["a positive integer"]
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(map(positive, block)):
        raise ConfigError(
            f"{source}: quantization_config.weight_block_size must be two positive integers, "
            f"got {shown(block)}"
        )
    return QuantizationConfig(method, (block[0], block[1]))


def _vision(raw: Any, source: str, defaulted: list[str]) -> VisionConfig:
    prefix = "vision_config."
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source}: vision_config must be an object, got {shown(raw)}")
    given = fields.resolve_aliases(raw, fields.VISION_ALIASES, source)
    known = fields.VISION_IGNORED | fields.VISION_FIELDS.keys() | fields.VISION_ONLY.keys()
    fields.refuse_unknown(given, known, source, prefix)
    fields.demand(given, fields.VISION_ONLY, source, prefix)
    for name in ("patch_size", "temporal_patch_size"):
        # transformers also allows one number per axis; the tower's kernel is square.
        size = given.get(name)
        if isinstance(size, list | tuple) and size and all(n == size[0] for n in size):
            given[name] = size[0]
    values, absent = fields.read_fields(given, fields.VISION_FIELDS, source, prefix)
    if values["hidden_size"] % values["num_heads"]:
        raise ConfigError(
            f"{source}: vision_config.hidden_size={values['hidden_size']} must be a multiple of "
            f"num_heads={values['num_heads']}"
        )
    defaulted.extend(absent)
    return VisionConfig(**values)
