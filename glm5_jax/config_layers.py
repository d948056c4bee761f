"""Per-layer lists of a config: layer kinds, feed-forward kinds, indexer kinds.

Each comes as an explicit list or in a derived form; the list wins and the loser is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from .config_fields import DEFAULT_DENSE_LAYERS, KINDS, shown
from .errors import ConfigError

Mixer = Literal["kda", "dsa"]
Mlp = Literal["dense", "moe"]
Indexer = Literal["full", "shared"]
Kind = TypeVar("Kind", Mixer, Mlp, Indexer)

LAYER_TYPES: dict[str, Mixer] = {
    "linear_attention": "kda",
    "deepseek_sparse_attention": "dsa",
    "full_attention": "dsa",
    "indexed_attention": "dsa",
}
MLP_TYPES: dict[str, Mlp] = {"dense": "dense", "sparse": "moe"}
INDEXER_TYPES: dict[str, Indexer] = {"full": "full", "shared": "shared"}
INDEXER_LETTERS: dict[str, Indexer] = {"F": "full", "S": "shared"}


def _named(
    values: Any, names: Mapping[str, Kind], lengths: tuple[int, ...], field: str, source: str
) -> tuple[Kind, ...]:
    """Translate a per-layer list, refusing another length and any value outside `names`."""
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{source}: {field} must be a list, got {shown(values)}")
    if len(values) not in lengths:
        raise ConfigError(
            f"{source}: {field} has {len(values)} entries, num_hidden_layers is {lengths[0]}"
        )
    for i, value in enumerate(values):
        if not isinstance(value, str) or value not in names:
            raise ConfigError(
                f"{source}: {field}[{i}] is {shown(value)}, "
                f"expected one of {', '.join(sorted(names))}"
            )
    return tuple(names[value] for value in values)


def _layer_indices(linear: Mapping[str, Any], key: str, source: str) -> frozenset[int] | None:
    values = linear.get(key)
    if values is None:
        return None
    integer = KINDS["a non-negative integer"]
    if not isinstance(values, list | tuple) or not all(integer(v) for v in values):
        raise ConfigError(
            f"{source}: linear_attn_config.{key} must be a list of layer indices, "
            f"got {shown(values)}"
        )
    return frozenset(values)


def layer_types(
    given: Mapping[str, Any], layers: int, source: str, overridden: list[str], defaulted: list[str]
) -> tuple[Mixer, ...]:
    """`kda` or `dsa` for every text layer.

    `linear_attn_config.kda_layers` and `.full_attn_layers` are never a source: files count them
    from 0 or from 1, and transformers ignores them. Beside `layer_types` they may lose; alone they
    must agree with the default (DSA at every fourth layer).
    """
    explicit = given.get("layer_types")
    kinds: tuple[Mixer, ...]
    if explicit is None:
        defaulted.append("layer_types")
        kinds = tuple("dsa" if i % 4 == 3 else "kda" for i in range(layers))
    else:
        kinds = _named(explicit, LAYER_TYPES, (layers,), "layer_types", source)
    linear = given.get("linear_attn_config") or {}
    for key, kind in (("kda_layers", "kda"), ("full_attn_layers", "dsa")):
        listed = _layer_indices(linear, key, source)
        if listed is None or listed == {i for i, k in enumerate(kinds) if k == kind}:
            continue
        if explicit is None:
            raise ConfigError(
                f"{source}: linear_attn_config.{key}={shown(sorted(listed))} is not the default "
                f"pattern and may count from 0 or from 1; give layer_types"
            )
        overridden.append(f"linear_attn_config.{key}: {shown(sorted(listed))} lost to layer_types")
    return kinds


def mlp_layer_types(
    given: Mapping[str, Any], layers: int, source: str, overridden: list[str], defaulted: list[str]
) -> tuple[Mlp, ...]:
    """`dense` or `moe` for every text layer: the list, else the first k, else the first 3 dense."""
    explicit, first_k = given.get("mlp_layer_types"), given.get("first_k_dense_replace")
    if first_k is not None and not KINDS["a non-negative integer"](first_k):
        raise ConfigError(
            f"{source}: first_k_dense_replace must be a non-negative integer, got {shown(first_k)}"
        )
    if first_k is None and explicit is None:
        defaulted.append("mlp_layer_types")
    dense = DEFAULT_DENSE_LAYERS if first_k is None else first_k
    derived: tuple[Mlp, ...] = tuple("dense" if i < dense else "moe" for i in range(layers))
    if explicit is None:
        return derived
    kinds: tuple[Mlp, ...] = _named(explicit, MLP_TYPES, (layers,), "mlp_layer_types", source)
    if first_k is not None and kinds != derived:
        overridden.append(f"first_k_dense_replace: {first_k} lost to mlp_layer_types")
    return kinds


def _indexer_schedule(given: Mapping[str, Any], layers: int, source: str) -> tuple[Indexer, ...]:
    """The frequency form: full at every `freq`-th layer, counted from `offset - 1`."""
    freq, offset = given.get("index_topk_freq"), given.get("index_skip_topk_offset")
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
    for name, value in (("index_topk_freq", freq), ("index_skip_topk_offset", offset)):
        if not KINDS["a non-negative integer"](value):
            raise ConfigError(
                f"{source}: {name} must be a non-negative integer, got {shown(value)}"
            )
    return tuple(
        "full" if max(i - offset + 1, 0) % max(freq, 1) == 0 else "shared" for i in range(layers)
    )


def indexer_types(
    given: Mapping[str, Any],
    kinds: tuple[Mixer, ...],
    source: str,
    overridden: list[str],
    defaulted: list[str],
) -> tuple[Indexer, ...]:
    """`full` or `shared` for every text layer (those of KDA layers are not used).

    The list, else `index_topk_pattern` (letters F and S, or a list), else the frequency form. A
    list may carry one entry more, for the MTP layer, which is always full. A `shared` DSA layer
    takes the choice of the last full DSA layer before it, so there must be one.
    """
    layers = len(kinds)
    lengths = (layers, layers + 1)
    # Every form that is given, the strongest first.
    forms: list[tuple[str, tuple[Indexer, ...]]] = []
    if (explicit := given.get("indexer_types")) is not None:
        types = _named(explicit, INDEXER_TYPES, lengths, "indexer_types", source)
        forms.append(("indexer_types", types))
    if (pattern := given.get("index_topk_pattern")) is not None:
        names = INDEXER_LETTERS if isinstance(pattern, str) else INDEXER_TYPES
        values = list(pattern) if isinstance(pattern, str) else pattern
        types = _named(values, names, lengths, "index_topk_pattern", source)
        forms.append(("index_topk_pattern", types))
    frequency = [
        name
        for name in ("index_topk_freq", "index_skip_topk_offset")
        if given.get(name) is not None
    ]
    if frequency:
        forms.append((" with ".join(frequency), _indexer_schedule(given, layers, source)))
    if not forms:
        defaulted.append("indexer_types")
        forms.append(("indexer_types", _indexer_schedule(given, layers, source)))

    winner, types = forms[0]
    if types[layers:] == ("shared",):
        overridden.append(f"{winner}[{layers}]: 'shared' lost, the MTP layer's indexer is full")
    types = types[:layers]
    for loser, other in forms[1:]:
        if other[:layers] != types:
            overridden.append(f"{loser}: lost to {winner}")
    sparse = [i for i, kind in enumerate(kinds) if kind == "dsa"]
    if sparse and types[sparse[0]] == "shared":
        raise ConfigError(
            f"{source}: layer {sparse[0]} is the first DSA layer and its indexer is 'shared', but "
            f"no full indexer comes before it; its entry in {winner} must be 'full'"
        )
    return types
