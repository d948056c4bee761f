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
from typing import Any, Literal, NamedTuple

import numpy as np

from ..config import parse_config
from ..specs import Naming, StoredSpec, stored_tensors
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


class Layout(NamedTuple):
    """How a checkpoint is stored. transformers writes router and convolution F32, and no MTP."""

    quantization: Literal["none"] | Scheme = "none"
    naming: Naming = "released"
    transformers: bool = False


# The three releases and what else is met: NVFP4 by another tool, and what transformers saves.
LAYOUTS = {
    "bf16": Layout(),
    "fp8": Layout("fp8"),
    "nvfp4_modelopt": Layout("nvfp4_modelopt"),
    "nvfp4_compressed_tensors": Layout("nvfp4_compressed_tensors"),
    "hf_saved": Layout(transformers=True),
    "hf_native": Layout(naming="native", transformers=True),
}


def write_rehearsal(
    out: str | os.PathLike[str],
    config: Mapping[str, Any],
    layout: Layout,
    layers: Layers = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write those layers of a checkpoint, and what lies outside the layers; returns the directory.

    config: a decoded config.json, whose sizes are written in full. There is no vision tower.
    Raises CheckpointError if `out` is in the way.
    """
    raw: dict[str, Any] = {key: x for key, x in config.items() if key != "quantization_config"}
    raw["vision_config"] = None
    if layout.quantization != "none":
        raw["quantization_config"] = quantization_config(layout.quantization)
    tensors = rehearsal_tensors(raw, layout, layers)
    out = Path(out).absolute()
    with whole_directory(out) as partial:
        files = TensorFiles(partial, tensors, shard_bytes)
        noise = np.random.default_rng(0).integers(0, 256, NOISE_BYTES, np.uint8)
        pools = {dtype: _masked(noise, dtype) for dtype in {x.dtype for x in tensors.values()}}
        for name, declared in tensors.items():
            _write(files, name, declared, pools[declared.dtype])
        files.write_index()
        text = json.dumps(raw, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
    return out


def rehearsal_tensors(
    config: Mapping[str, Any], layout: Layout, layers: Layers = None
) -> dict[str, Declared]:
    """What `write_rehearsal` writes: every tensor of those layers and outside the layers."""
    parsed = parse_config(config, "config")
    chosen = resolve_layers(layers, parsed)
    specs = stored_tensors(parsed, layout.naming, mtp=not layout.transformers, vision=False)
    wanted = (x for x in specs if chosen is None or x.layer is None or x.layer in chosen)
    return {name: declared for spec in wanted for name, declared in _declared(spec, layout)}


def _declared(spec: StoredSpec, layout: Layout) -> Iterator[tuple[str, Declared]]:
    """The tensors that a weight is stored as."""
    quantization = layout.quantization
    if quantization == "none" or not is_quantized(spec, quantization):
        float32 = layout.transformers and any(row.keep_stored for row in spec.specs)
        yield spec.name, Declared("F32" if float32 else spec.dtype, spec.shape)
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
    (second,) = words.keys() - {"codes", "scale"}
    yield stem + words[second], Declared("F32", () if second == "scale_2" else (1,))


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
