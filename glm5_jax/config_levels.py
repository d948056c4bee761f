"""The two levels of a config.json, top and `text_config`, made one flat dict of text fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import config_fields as fields
from .config_fields import shown
from .errors import ConfigError

MODEL_TYPES = ("glm5_next", "glm5_next_text")

# null in one of these is how transformers writes "not given".
_NULL_IS_ABSENT = frozenset(
    {
        "layer_types",
        "mlp_layer_types",
        "first_k_dense_replace",
        "indexer_types",
        "index_topk_pattern",
        "index_topk_freq",
        "index_skip_topk_offset",
        "linear_attn_config",
        "num_key_value_heads",
        "eos_token_id",
        "dtype",
        "quantization_config",
    }
)


def merge_levels(raw: Mapping[str, Any], source: str, overridden: list[str]) -> dict[str, Any]:
    """Merge the levels by field, the nested one winning; what lost is noted in `overridden`.

    `linear_attn_config` arrives as flat `linear_*` fields and aliases under their first name.
    """
    _check_model_types(raw, source)
    top = _text_fields(raw, "", source, overridden)
    text = _text_fields(raw.get("text_config") or {}, "text_config.", source, overridden)
    rivals = {name: form for form in fields.FORMS for name in form}
    merged = dict(text)
    for key, value in top.items():
        winner = next((rival for rival in (key, *rivals.get(key, ())) if rival in text), None)
        if winner is None:
            merged[key] = value
        elif (winner != key or value != text[key]) and key not in fields.TEXT_IGNORED:
            overridden.append(
                f"{key}: {shown(value)} at the top level lost to "
                f"text_config.{winner}={shown(text[winner])}"
            )
    return merged


def _check_model_types(raw: Mapping[str, Any], source: str) -> None:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"{source}: model_type must be {' or '.join(MODEL_TYPES)}, got {shown(model_type)}"
        )
    nested = raw.get("text_config")
    if nested is None:
        return
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{source}: text_config must be an object, got {shown(nested)}")
    nested_type = nested.get("model_type", "glm5_next_text")
    if nested_type != "glm5_next_text":
        raise ConfigError(
            f"{source}: text_config.model_type must be glm5_next_text, got {shown(nested_type)}"
        )


def _text_fields(
    level: Mapping[str, Any], prefix: str, source: str, overridden: list[str]
) -> dict[str, Any]:
    """Text fields of one level that are really given, each under its one flat name."""
    given = {
        key: value
        for key, value in level.items()
        if key not in ("text_config", "vision_config", "model_type")
        and not (value is None and key in _NULL_IS_ABSENT)
    }
    if given.get("quantization_config") == {}:
        del given["quantization_config"]
    given = fields.resolve_aliases(given, fields.TEXT_ALIASES, source)
    return _flatten_linear(given, prefix, source, overridden)


def _flatten_linear(
    given: dict[str, Any], prefix: str, source: str, overridden: list[str]
) -> dict[str, Any]:
    """Rewrite the numbers of `linear_attn_config` as flat `linear_*` fields; the dict wins.

    A lower bound of null beside the dict means −5 unless its `safe_gate` is false; only then is it
    the softplus form. A flat `linear_lower_bound: null` without the dict is the softplus form too.
    """
    linear = given.get("linear_attn_config")
    if linear is None:
        return given
    where = f"{prefix}linear_attn_config"
    if not isinstance(linear, Mapping):
        raise ConfigError(f"{source}: {where} must be an object, got {shown(linear)}")
    known = fields.LINEAR_ATTN_OTHER | fields.LINEAR_ATTN_KEYS.keys()
    fields.refuse_unknown(linear, known, source, f"{where}.")
    safe_gate = linear.get("safe_gate", True)
    if not isinstance(safe_gate, bool):
        raise ConfigError(
            f"{source}: {where}.safe_gate must be true or false, got {shown(safe_gate)}"
        )
    flat = dict(given)
    for key, name in fields.LINEAR_ATTN_KEYS.items():
        if key not in linear:
            continue
        fields.check_kind(fields.TEXT_FIELDS[name], linear[key], source, f"{where}.{key}")
        if name in given and given[name] != linear[key]:
            overridden.append(
                f"{prefix}{name}: {shown(given[name])} lost to {where}.{key}={shown(linear[key])}"
            )
        flat[name] = linear[key]
    if safe_gate and "linear_lower_bound" in flat and flat["linear_lower_bound"] is None:
        flat["linear_lower_bound"] = fields.TEXT_FIELDS["linear_lower_bound"].default
    return flat
