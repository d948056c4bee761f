"""Bytes on each of several devices: weights, the state of a batch, and what a call needs meanwhile.

Weights and state are exact: they follow from the spec table, the rules that cut them and what a
cache holds. What a call needs is an estimate, see `activation_budget`, which JAX comes with. No
device is needed, and no weight is read.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from .budget import ACTIVATION_BYTES, state_budget
from .checkpoint.dtypes import leaf_dtype
from .checkpoint.layouts import NVFP4_GROUP, RELEASED_WORDS, Scheme
from .checkpoint.orbax import StoredLeaf, is_orbax
from .checkpoint.quantize import BLOCK, is_quantized
from .checkpoint.restore import open_leaves
from .config import ModelConfig, load_config
from .errors import ConfigError
from .sharding import (
    PRESETS,
    MeshShape,
    ShardingRules,
    array_pieces,
    check_rules,
    find_rules,
    part_of,
)
from .specs import ROLES, Leaf, leaves, stored_tensors

Arrays = Mapping[str, Mapping[str, StoredLeaf]]
"""By the path of a leaf, the arrays in memory that it is, by their own paths."""

GB = 10**9
# As NVIDIA's data sheets have the SXM modules. Drivers report 85.5, about 150, and 191.5 GB; the
# last is also sold as 180.
DEVICES: Mapping[str, int] = {"H100": 80 * GB, "H200": 141 * GB, "B200": 192 * GB}
# What JAX may have of it, set by XLA_CLIENT_MEM_FRACTION: it takes 0.75 by itself. The rest is for
# the CUDA context, for what libraries and collectives keep, and for holes.
USABLE = 0.9

_DISK = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
_METHODS: Mapping[str, Scheme] = {
    "fp8": "fp8",
    "modelopt": "nvfp4_modelopt",
    "compressed-tensors": "nvfp4_compressed_tensors",
}
_LAYOUTS: Mapping[str, Scheme] = {scheme: scheme for scheme in RELEASED_WORDS}
_DTYPES = ("stored", "bfloat16", "float32", "float64", *_LAYOUTS)


def planned_arrays(config: ModelConfig, dtype: str, mtp: bool) -> dict[str, dict[str, StoredLeaf]]:
    """The arrays of a model that is not there, by leaf.

    dtype: as `glm.load` takes it of an unquantised release; or the layout of a quantised release,
    as `make_tiny` takes it, whose weights stay as they are stored. ``stored`` is what the config
    says of quantisation, and the unquantised release where it says nothing.
    """
    scheme = _LAYOUTS.get(dtype)
    if dtype == "stored" and config.quantization is not None:
        scheme = _METHODS.get(config.quantization.method)
        if scheme is None:
            raise ConfigError(
                f"quantization_config.quant_method {config.quantization.method!r}: no layout that "
                f"is known; say which dtype instead: {', '.join(_DTYPES[1:])}"
            )
    quantized: set[str] = set()
    if scheme is not None:
        tensors = stored_tensors(config, mtp=mtp, vision=False)
        quantized = {spec.name for spec in tensors if is_quantized(spec, scheme)}
    arrays = {}
    for path, leaf in leaves(config, mtp=mtp).items():
        if scheme is not None and leaf.sources[0] in quantized:
            arrays[path] = _quantized(leaf, scheme, config)
        else:
            as_dtype = "stored" if scheme else dtype
            arrays[path] = {
                path: StoredLeaf(leaf.shape, leaf_dtype(leaf, _DISK[leaf.dtype], as_dtype))
            }
    return arrays


def _quantized(leaf: Leaf, scheme: Scheme, config: ModelConfig) -> dict[str, StoredLeaf]:
    """Codes and scales of a leaf, as the release of a layout has them."""
    *stack, out, into = leaf.shape
    forms: dict[str, tuple[tuple[int, ...], DTypeLike]]
    if scheme == "fp8":
        given = config.quantization and config.quantization.weight_block_size
        rows, columns = given or BLOCK
        forms = {
            "codes": ((out, into), ml_dtypes.float8_e4m3fn),
            "scale": ((-(-out // rows), -(-into // columns)), np.float32),
        }
    elif into % NVFP4_GROUP:
        forms = {"": ((out, into), _DISK[leaf.dtype])}
    else:
        codes, scale, whole = RELEASED_WORDS[scheme]
        forms = {
            codes: ((out, into // 2), np.uint8),
            scale: ((out, into // NVFP4_GROUP), ml_dtypes.float8_e4m3fn),
            whole: ((), np.float32),
        }
    return {
        f"{leaf.path}.{key}" if key else leaf.path: StoredLeaf((*stack, *shape), np.dtype(dtype))
        for key, (shape, dtype) in forms.items()
    }


@dataclass(frozen=True)
class DeviceBudget:
    """Bytes on one device of a mesh; every device has as many.

    weights_by_role, state_by_kind: exact, in the order of an audit and of a cache.
    decode, prefill: what a step of one token a row, and a call of `prefill_tokens` tokens a row,
    hold besides when that is most, an estimate (see `activation_budget`) of what `glm.generate`
    does: the cache of a call gives its memory to the one after it.
    """

    mesh: Mapping[str, int]
    rules: ShardingRules
    dtype: str
    context: int
    batch: int
    rewind: int
    mtp: bool
    prefill_tokens: int
    weights_by_role: Mapping[str, int]
    state_by_kind: Mapping[str, int]
    decode: Mapping[str, int]
    prefill: Mapping[str, int]

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.mesh.values())

    @property
    def weights(self) -> int:
        """Bytes of the arrays of the model."""
        return sum(self.weights_by_role.values())

    @property
    def state(self) -> int:
        """Bytes of the cache."""
        return sum(self.state_by_kind.values())

    @property
    def activations(self) -> int:
        """Estimated bytes of what a step or a call holds besides, the larger of the two."""
        return max(sum(self.decode.values()), sum(self.prefill.values()))

    @property
    def total(self) -> int:
        """Weights, state and activations."""
        return self.weights + self.state + self.activations

    @property
    def fits(self) -> dict[str, bool]:
        """Of each of `DEVICES`, whether `total` is at most the part of it that is `USABLE`."""
        return {name: self.total <= USABLE * size for name, size in DEVICES.items()}


def device_budget(
    config: ModelConfig | str | os.PathLike[str],
    mesh: MeshShape,
    rules: ShardingRules | str | None = None,
    dtype: str = "stored",
    context: int = 131_072,
    batch: int = 1,
    rewind: int = 0,
    mtp: bool = False,
    prefill_tokens: int = 1024,
) -> DeviceBudget:
    """What each device of a mesh holds of a model, of the cache of a batch, and in its calls.

    config: a `ModelConfig`, a config.json, or a directory. Of a directory with weights and the
    dtype ``stored`` or ``bfloat16`` the arrays are those that `glm.load` would give; else they are
    planned from the config. mesh: sizes by axis name. rules: as `glm.load` takes them. dtype: also
    ``fp8``, ``nvfp4_modelopt`` or ``nvfp4_compressed_tensors``, the weights as that release stores
    them. context: tokens that a row may have. rewind: how many it can go back. mtp: with the MTP
    head and its cache. prefill_tokens: of each row in a call that reads prompts, as many as
    `glm.generate` gives.

    Raises:
        ConfigError: the config or an argument makes no sense, or the mesh does not divide the
            model evenly.
        CheckpointError: the weights of a directory are not those of a model.
    """
    sizes = (("context", context, 1), ("batch", batch, 1), ("prefill_tokens", prefill_tokens, 1))
    axes = ((f"mesh axis {axis}", size, 1) for axis, size in mesh.items())
    for name, value, least in (*sizes, *axes, ("rewind", rewind, 0)):
        if value < least:
            raise ConfigError(f"{name}: expected {least} or more, got {value}")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    rules, mesh = find_rules(rules), dict(mesh)
    config, model, arrays = _arrays(config, dtype, mtp)
    if mtp:
        if not any(path.startswith("mtp.") for path in model):
            raise ConfigError("mtp: the config has no MTP layer (num_nextn_predict_layers)")
        config = replace(config, num_nextn_predict_layers=1)
    check_rules(rules, config, mesh)
    activations = arrays["embed_tokens"]["embed_tokens"].dtype.name

    # How the model cuts its work is said where it does, which JAX comes with.
    from .activation_budget import Call, Stages, call_terms, step_terms

    def stages(tokens: int) -> Stages:
        call = Call(batch, tokens, context, ACTIVATION_BYTES[activations])
        return Stages(config, rules, mesh, call, model, arrays)

    return DeviceBudget(
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        context=context,
        batch=batch,
        rewind=rewind,
        mtp=mtp,
        prefill_tokens=prefill_tokens,
        weights_by_role=_weights(rules, mesh, model, arrays),
        state_by_kind=_state(config, rules, mesh, activations, context, batch, rewind, mtp),
        decode=step_terms(stages(1)),
        prefill=call_terms(stages(prefill_tokens)),
    )


def _arrays(
    config: ModelConfig | str | os.PathLike[str], dtype: str, mtp: bool
) -> tuple[ModelConfig, Mapping[str, Leaf], Arrays]:
    """The config, the leaves, and their arrays as they are stored or planned."""
    if not isinstance(config, ModelConfig):
        path = Path(config)
        # In other dtypes nothing hangs on what is stored.
        hangs_on_it = dtype in ("stored", "bfloat16") and path.is_dir()
        if hangs_on_it and (is_orbax(path) or any(path.glob("*.safetensors*"))):
            reader = open_leaves(path, dtype, mtp)
            return reader.config, reader.leaves, {p: reader.arrays(p) for p in reader.leaves}
        config = load_config(path)
    return config, leaves(config, mtp=mtp), planned_arrays(config, dtype, mtp)


def _weights(
    rules: ShardingRules, mesh: MeshShape, model: Mapping[str, Leaf], arrays: Arrays
) -> dict[str, int]:
    """Bytes on a device by role."""
    found: Counter[str] = Counter()
    for path, leaf in model.items():
        for array in arrays[path].values():
            part = part_of(array.shape, array_pieces(rules, leaf, array.shape, mesh), mesh)
            found[leaf.role] += math.prod(part) * array.dtype.itemsize
    return {role: found[role] for role in ROLES if role in found}


def _state(
    config: ModelConfig,
    rules: ShardingRules,
    mesh: MeshShape,
    dtype: str,
    context: int,
    batch: int,
    rewind: int,
    mtp: bool,
) -> dict[str, int]:
    """Bytes on a device of `TextModel.init_cache`: rows and KDA's heads are cut, counters not."""
    one = state_budget(config, dtype, rewind).per_rank(rules.parts("kda_heads", mesh))
    rows, pools = rules.share(batch, "batch", mesh), context // config.index_kpool
    state = {
        "kda_recurrent": rows * one.kda_recurrent,
        "kda_conv": rows * one.kda_conv,
        "kda_replay": rows * one.kda_replay,
        "dsa_kv": rows * context * one.dsa_kv_per_token,
        "dsa_indexer": rows * context * one.dsa_indexer_per_token,
        "dsa_pools": rows * pools * one.dsa_bytes_per_pool,
        "counters": batch * one.counters,
    }
    if mtp:
        state["mtp"] = rows * (context * one.mtp_per_token + pools * one.mtp_bytes_per_pool)
        state["counters"] += batch * one.mtp_counters
    return state


def device_budget_dict(budget: DeviceBudget) -> dict[str, Any]:
    """A budget as plain numbers, for JSON."""
    derived = ("devices", "weights", "state", "activations", "total", "fits")
    return asdict(budget) | {name: getattr(budget, name) for name in derived}


def device_budget_text(budget: DeviceBudget) -> str:
    """A budget as a table to read."""
    mesh = ",".join(f"{name}={size}" for name, size in budget.mesh.items())
    rules = next((name for name, preset in PRESETS.items() if preset == budget.rules), "of its own")
    sections = (
        ("weights", budget.weights_by_role),
        ("state", budget.state_by_kind),
        ("a step of decoding, about", budget.decode),
        (f"a call of {budget.prefill_tokens:,} tokens a row, about", budget.prefill),
    )
    entry = "{:<38}{:>20} B".format
    lines = [
        f"each of {budget.devices} devices, mesh {mesh or 'of one'}, rules {rules}, weights "
        f"{budget.dtype}, {budget.batch} rows of {budget.context:,} tokens"
    ]
    for title, terms in sections:
        lines += ["", entry(title, f"{sum(terms.values()):,}")]
        lines += [entry(f"  {name}", f"{size:,}") for name, size in terms.items()]
    lines += ["", entry("total, with the larger of the two", f"{budget.total:,}"), ""]
    for name, size in DEVICES.items():
        room = USABLE * size - budget.total
        word = "fits, {:.1f} GB free" if budget.fits[name] else "does not fit, {:.1f} GB too much"
        of = f"{name}, {USABLE * size / GB:.1f} GB for JAX of {size / GB:.0f}"
        lines.append(f"{of}: {word.format(abs(room) / GB)}")
    return "\n".join(lines)
