"""Checkpoints of real size, written as fast as the disk takes them, to try tools on.

Names, dtypes and shapes are those of a release; the values are noise in the layout's own encoding,
finite and of moderate size, and no model. No JAX here.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..config import parse_config
from ..specs import StoredSpec, stored_tensors
from .layouts import NVFP4_GROUP, RELEASED_WORDS, Scheme
from .match import Layers, resolve_layers
from .quantize import BLOCK, is_quantized, quantization_config
from .writer import SHARD_BYTES, Declared, TensorFiles, whole_directory

NOISE_BYTES = 64 * 2**20
WRITE_BYTES = 16 * 2**20
# Of each element, the bits that stay noise and the bits that are set: no NaN, no infinity, nothing
# tiny or huge; a scale is positive.
_MASKS: dict[str, tuple[type, int, int]] = {
    "BF16": (np.uint16, 0x80FF, 0x3C00),
    "F32": (np.uint32, 0x00FFFFFF, 0x3C000000),
    "F8_E4M3": (np.uint8, 0xB7, 0x08),
    "U8": (np.uint8, 0xFF, 0x00),
}


def write_rehearsal(
    out: str | os.PathLike[str],
    config: Mapping[str, Any],
    quantization: Literal["none"] | Scheme = "none",
    layers: Layers = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write those layers of a checkpoint, and what lies outside the layers; returns the directory.

    config: a decoded config.json, whose sizes are written in full. quantization: the layout, as
    `make_tiny` takes it. There is no vision tower. Raises CheckpointError if `out` is in the way.
    """
    raw: dict[str, Any] = {key: x for key, x in config.items() if key != "quantization_config"}
    raw["vision_config"] = None
    if quantization != "none":
        raw["quantization_config"] = quantization_config(quantization)
    parsed = parse_config(raw, "config")
    chosen = resolve_layers(layers, parsed)
    specs = stored_tensors(parsed, vision=False)
    wanted = [x for x in specs if chosen is None or x.layer is None or x.layer in chosen]
    tensors = {
        name: declared for spec in wanted for name, declared in _declared(spec, quantization)
    }
    out = Path(out).absolute()
    with whole_directory(out) as partial:
        files = TensorFiles(partial, tensors, shard_bytes)
        noise = np.random.default_rng(0).integers(0, 256, NOISE_BYTES, np.uint8)
        pools = {dtype: _masked(noise, dtype) for dtype in {x.dtype for x in tensors.values()}}
        for name, declared in tensors.items():
            _write(files, name, declared, pools[declared.dtype])
        files.close()
        text = json.dumps(raw, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
    return out


def _declared(
    spec: StoredSpec, quantization: Literal["none"] | Scheme
) -> Iterator[tuple[str, Declared]]:
    """The tensors that a weight is stored as."""
    if quantization == "none" or not is_quantized(spec, quantization):
        yield spec.name, Declared(spec.dtype, spec.shape)
        return
    out, into = spec.shape
    stem, words = spec.name.removesuffix("weight"), RELEASED_WORDS[quantization]
    if quantization == "fp8":
        yield stem + words["codes"], Declared("F8_E4M3", (out, into))
        grid = (-(-out // BLOCK[0]), -(-into // BLOCK[1]))
        yield stem + words["scale"], Declared("F32", grid)
        return
    yield stem + words["codes"], Declared("U8", (out, into // 2))
    yield stem + words["scale"], Declared("F8_E4M3", (out, into // NVFP4_GROUP))
    (whole,) = words.keys() - {"codes", "scale"}
    yield stem + words[whole], Declared("F32", ())


def _masked(noise: np.ndarray, dtype: str) -> np.ndarray:
    element, kept, added = _MASKS[dtype]
    return (noise.view(element) & element(kept)) | element(added)


def _write(files: TensorFiles, name: str, declared: Declared, pool: np.ndarray) -> None:
    """Noise from a place of the pool that hangs on the name, so that no two tensors are alike."""
    size, at, done = math.prod(declared.shape), zlib.crc32(name.encode()) % pool.size, 0
    most = WRITE_BYTES // pool.itemsize
    while done < size:
        part = pool[at : at + min(most, size - done)]
        files.write(name, part, done)
        done += part.size
        at = (at + part.size) % pool.size
