"""A checkpoint of random weights in any of the layouts, for demos and tests.

Names, shapes and dtypes come from the spec table. Every parameter is random, also those that a
training run starts at 0 or 1, at a scale where each changes the logits. A tensor's values hang on
the seed and its released name alone: whatever the naming, the sharding and the dtype, one seed
means the same weights. A quantised layout has what its encoder makes of them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from ..config import ModelConfig, parse_config
from ..errors import CheckpointError
from ..specs import Naming, StoredSpec, TensorSpec, evaluate_shape, stored_tensors
from .layouts import RELEASED_WORDS, Scheme
from .quantize import BLOCK, quantization_config, quantize

_NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
_STORED_AS = {"bfloat16": "BF16", "float32": "F32"}

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def packaged_config(name: str) -> Path:
    """Path of a config that ships with the package: ``tiny``, ``bench`` or ``glm5_3_flash``."""
    package = Path(__file__).resolve().parents[1]
    # In an installed wheel the configs lie inside the package, in a source tree beside it.
    for folder in (package / "configs", package.parent / "configs"):
        if (file := folder / f"{name}.json").is_file():
            return file
    raise CheckpointError(f"{name}.json: not among the configs that ship with the package")


def make_tiny(
    out: str | os.PathLike[str],
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    naming: Naming = "released",
    shards: int = 1,
    seed: int = 0,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    quantization: Literal["none"] | Scheme = "none",
) -> Path:
    """Write a directory of random weights with its config.json; returns the directory.

    config: a config.json, a directory that holds one, or its decoded content; the packaged
    ``tiny`` if None. naming: ``released``, or ``native`` (transformers' module names, with fused
    experts and conv). dtype: what is BF16 in a release is stored as this; what must be float32 is
    float32. With more than one shard there is an index, as in a release. The MTP layer and the
    vision tower are written if the config has them. One shard is held in memory at a time.

    quantization: ``fp8``, ``nvfp4_modelopt`` or ``nvfp4_compressed_tensors`` stores quantised what
    the release of that layout does, see `quantize`; FP8 blocks are those of the config if it names
    any, else 128 × 128.

    Raises CheckpointError for an argument that makes no sense, and if `out` exists and is not an
    empty directory: nothing is overwritten.
    """
    if naming not in ("released", "native"):
        raise CheckpointError(f"naming: expected 'released' or 'native', got {naming!r}")
    if dtype not in _STORED_AS:
        raise CheckpointError(f"dtype: expected 'bfloat16' or 'float32', got {dtype!r}")
    if quantization != "none" and quantization not in RELEASED_WORDS:
        kinds = ", ".join(("none", *RELEASED_WORDS))
        raise CheckpointError(f"quantization: expected one of {kinds}, got {quantization!r}")
    if quantization != "none" and naming == "native":
        raise CheckpointError(
            "quantization: transformers' fused experts have no quantised form; use naming released"
        )
    raw, source = _read_config(config)
    model = parse_config(raw, source)
    scheme = None if quantization == "none" else quantization
    given = model.quantization and model.quantization.weight_block_size
    block = given or BLOCK
    out = Path(out).absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out}: exists already; choose another directory or delete it")

    tensors = list(stored_tensors(model, naming))
    files = _shard(tensors, shards)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        _write_weights(partial, files, model, seed, dtype, scheme, block)
        # Storage is what we write, whatever layout the config was taken from.
        raw = {k: v for k, v in raw.items() if k != "quantization_config"} | {"dtype": dtype}
        if scheme is not None:
            raw["quantization_config"] = quantization_config(scheme, block)
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _read_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> tuple[dict[str, Any], str]:
    if isinstance(config, Mapping):
        return dict(config), "config"
    file = packaged_config("tiny") if config is None else Path(config)
    file = file / "config.json" if file.is_dir() else file
    try:
        return json.loads(file.read_bytes()), str(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as a config.json: {error}") from None


def _shard(tensors: list[StoredSpec], shards: int) -> dict[str, list[StoredSpec]]:
    """Tensors by file, in order, the files of about equal size and none empty."""
    if not 1 <= shards <= len(tensors):
        raise CheckpointError(
            f"shards: expected 1 to {len(tensors)} (one tensor each), got {shards}"
        )
    if shards == 1:
        return {"model.safetensors": tensors}
    sizes = [math.prod(tensor.shape) for tensor in tensors]
    total, seen, number = sum(sizes), 0, 0
    files: dict[str, list[StoredSpec]] = {}
    for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        full = seen * shards >= total * number
        if number < shards and (full or len(tensors) - index == shards - number):
            number += 1
        files.setdefault(f"model-{number:05d}-of-{shards:05d}.safetensors", []).append(tensor)
        seen += size
    return files


def _write_weights(
    directory: Path,
    files: dict[str, list[StoredSpec]],
    model: ModelConfig,
    seed: int,
    dtype: str,
    scheme: Scheme | None,
    block: tuple[int, int],
) -> None:
    from safetensors.numpy import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for file, tensors in files.items():
        arrays: dict[str, np.ndarray] = {}
        for tensor in tensors:
            stored = "F32" if tensor.dtype == "F32" else _STORED_AS[dtype]
            values = np.ascontiguousarray(_values(tensor, model, seed, stored))
            if scheme is None:
                arrays[tensor.name] = values
            else:
                arrays |= quantize(tensor, values, scheme, block)
        total += sum(array.nbytes for array in arrays.values())
        weight_map |= dict.fromkeys(arrays, file)
        # transformers refuses a file that does not name its format.
        save_file(arrays, directory / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _values(tensor: StoredSpec, model: ModelConfig, seed: int, stored: str) -> np.ndarray:
    """The tensor's values, put together from the released tensors that it carries."""

    def rows(expert: int | None) -> np.ndarray:
        parts = [_released(tensor, spec, expert, model, seed, stored) for spec in tensor.specs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    if tensor.specs[0].transform == "stack" and tensor.expert is None:
        return np.stack([rows(expert) for expert in range(tensor.shape[0])])
    return rows(tensor.expert)


def _released(
    tensor: StoredSpec,
    spec: TensorSpec,
    expert: int | None,
    model: ModelConfig,
    seed: int,
    stored: str,
) -> np.ndarray:
    name = spec.name.replace("{layer}", str(tensor.layer)).replace("{expert}", str(expert))
    # The vision tower is called the same in both namings.
    name = tensor.name if "{block}" in name else name
    shape = evaluate_shape(spec.shape, model.dims)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = _distribution(spec, model)(rng, shape).astype(np.float32)
    if spec.dtype == "BF16":
        # On bfloat16's grid also when stored as float32: both dtypes are one model.
        values = values.astype(ml_dtypes.bfloat16)
    return values.astype(_NUMPY[stored], copy=False)


def _around(mean: float, spread: float) -> Draw:
    return lambda rng, shape: mean + spread * rng.standard_normal(shape, np.float32)


def _between(low: float, high: float) -> Draw:
    return lambda rng, shape: rng.uniform(low, high, shape)


def _matrix(gain: float) -> Draw:
    return lambda rng, shape: _around(0.0, gain / math.sqrt(shape[-1]))(rng, shape)


# By the end of the leaf's path; what is not here is a matrix that keeps unit variance. So every
# activation stays near unit size, sigmoids are not saturated, decays range from slow to fast, the
# correction bias decides some choices, and the logits have a deviation of a few units.
_DISTRIBUTIONS: dict[str, Draw] = {
    "embed_tokens": _around(0.0, 1.0),
    "lm_head": _matrix(2.0),
    "norm": _around(1.0, 0.25),
    "norm_weight": _around(1.0, 0.25),
    "norm_bias": _around(0.0, 0.4),
    "_hc.base": _around(0.0, 0.7),
    "_hc.scale": _around(1.0, 0.3),
    "indexer.ape": _around(0.0, 1.0),
    "indexer.compress_gate": _matrix(1.5),
    "attn.conv": _around(0.0, 0.6),
    "attn.A_log": _around(0.0, 0.5),
    "router.bias": _around(0.0, 0.15),
    "gate_proj": _matrix(1.5),
    "up_proj": _matrix(1.5),
}


def _distribution(spec: TensorSpec, model: ModelConfig) -> Draw:
    if spec.role == "vision":
        return _around(0.0, 0.1)
    if spec.path is None:
        return _matrix(1.0)
    if spec.path.endswith("dt_bias"):
        # Slow to fast under either form of the gate.
        return _between(-5.0, 0.5) if model.linear_lower_bound is not None else _between(-4.0, 1.5)
    for ending, draw in _DISTRIBUTIONS.items():
        if spec.path.endswith(ending):
            return draw
    return _matrix(1.0)
