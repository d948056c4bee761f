"""Parameters of the model out of a directory: Orbax or safetensors, bit for bit the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from ..config import ModelConfig, load_config
from ..errors import CheckpointError
from ..specs import Leaf, leaves
from . import codecs
from .bind import bind, read_array, read_leaf
from .dtypes import check_dtype, decoded_dtype, leaf_dtype
from .layouts import check_arrays
from .orbax import StoredLeaf, is_orbax, load_arrays, stored_leaves
from .reader import INDEX, open_checkpoint


def load_leaves(
    path: str | os.PathLike[str], dtype: str = "stored", mtp: bool = False
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The config and every array of the parameter tree by dotted path, layers in numeric order.

    path: an Orbax directory of `convert`, or a safetensors directory (or file) directly.
    dtype: ``stored``, ``bfloat16``, ``float32`` or ``float64``; see `dtypes.leaf_dtype` for what
    stays float32. ``stored`` gives a quantised leaf as the arrays that are stored
    (``<path>.codes``, ``<path>.scale``, ...), any other dtype decodes it. mtp: also the MTP layer,
    under ``mtp.``.

    Raises CheckpointError, one line, if the directory is neither, unfinished or damaged, if a leaf
    is missing or of another shape, if a scale is not finite, or if the MTP layer is asked for and
    not there.
    """
    check_dtype(dtype)
    if dtype == "float64":
        _require_x64()
    path = Path(path)
    if is_orbax(path):
        config, found = _from_orbax(path.resolve(), dtype, mtp)
    elif path.is_file() or (path / INDEX).exists() or any(path.glob("*.safetensors")):
        config, found = _from_safetensors(path, dtype, mtp)
    else:
        raise CheckpointError(
            f"{path}: neither an Orbax directory of `convert` nor a directory of .safetensors files"
        )
    return config, dict(found)


def _require_x64() -> None:
    import jax

    if not jax.config.read("jax_enable_x64"):
        raise CheckpointError(
            'dtype float64 needs JAX\'s 64-bit mode: jax.config.update("jax_enable_x64", True) '
            "before any array is made, or JAX_ENABLE_X64=1 in the environment"
        )


Leaves = Iterator[tuple[str, np.ndarray]]


def _from_safetensors(path: Path, dtype: str, mtp: bool) -> tuple[ModelConfig, Leaves]:
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    bound = bind(checkpoint, config, mtp=mtp)
    if mtp and not any(name.startswith("mtp.") for name in bound):
        raise _no_mtp(path)

    def read() -> Leaves:
        for name, source in bound.items():
            if not source.quantized:
                (array,) = source.arrays
                target = leaf_dtype(source.leaf, array.dtype, dtype)
                yield name, read_leaf(checkpoint, source, target)
            elif (decoded := decoded_dtype(source.leaf, dtype)) is not None:
                yield name, read_leaf(checkpoint, source, decoded)
            else:
                for array in source.arrays:
                    yield array.path, read_array(checkpoint, array)

    return config, read()


def _from_orbax(directory: Path, dtype: str, mtp: bool) -> tuple[ModelConfig, Leaves]:
    config = load_config(directory)
    stored = stored_leaves(directory)
    if mtp and not any(name.startswith("mtp.") for name in stored):
        raise _no_mtp(directory)
    # What is stored decides whether there is an MTP layer; a config may be silent about it.
    expected = leaves(replace(config, num_nextn_predict_layers=1), mtp=mtp)
    block = None if config.quantization is None else config.quantization.weight_block_size
    keys = _check_tree(directory, expected, stored, block)

    def read() -> Leaves:
        # All at once; where they are cast a layer at a time, lest more than one is held twice.
        unit = (lambda item: "") if dtype == "stored" else (lambda item: _unit(item[0]))
        for _, group in groupby(expected.items(), key=unit):
            members = dict(group)
            paths = [array for path in members for array in keys[path].values()]
            arrays = load_arrays(directory, paths)
            for name, leaf in members.items():
                found = {key: arrays.pop(path) for key, path in keys[name].items()}
                yield from _restored(directory, name, leaf, found, block, dtype)

    return config, read()


def _restored(
    directory: Path,
    name: str,
    leaf: Leaf,
    arrays: dict[str, np.ndarray],
    block: tuple[int, int] | None,
    dtype: str,
) -> Leaves:
    """One leaf out of its arrays by key: decoded, cast, or as stored."""
    if "" in arrays:
        array = arrays.pop("")
        yield name, array.astype(leaf_dtype(leaf, array.dtype, dtype), copy=False)
        return
    for key, array in arrays.items():
        if problem := codecs.scale_problem(key, array):
            raise CheckpointError(f"{directory}: {name}.{key}: {problem}")
    decoded = decoded_dtype(leaf, dtype)
    if decoded is not None:
        yield name, codecs.decode(arrays, block, decoded)
    else:
        yield from ((f"{name}.{key}", array) for key, array in arrays.items())


def _unit(path: str) -> str:
    return path if not path.startswith("layers.") else ".".join(path.split(".", 2)[:2])


def _check_tree(
    directory: Path,
    expected: dict[str, Leaf],
    stored: dict[str, StoredLeaf],
    block: tuple[int, int] | None,
) -> dict[str, dict[str, str]]:
    """By leaf, its arrays' paths by key, codes first; a plain leaf is one array, of key ""."""
    keys = {path: _array_paths(path, stored) for path in expected}
    missing = [path for path in expected if not keys[path]]
    if missing:
        raise CheckpointError(
            f"{directory}: {len(missing)} of {len(expected)} leaves are not there, the first is "
            f"{missing[0]}; was only a part converted (--layers)?"
        )
    for path, leaf in expected.items():
        if path not in stored:
            arrays = {key: stored[array] for key, array in keys[path].items()}
            for wrong in check_arrays(path, leaf.shape, arrays, block, str(directory)):
                raise CheckpointError(str(wrong))
        elif stored[path].shape != leaf.shape:
            raise CheckpointError(
                f"{directory}: {path}: config.json makes it {list(leaf.shape)}, "
                f"the checkpoint has {list(stored[path].shape)}"
            )
    return keys


def _array_paths(path: str, stored: dict[str, StoredLeaf]) -> dict[str, str]:
    if path in stored:
        return {"": path}
    named = ((key, f"{path}.{key}") for key in codecs.KEYS)
    return {key: array for key, array in named if array in stored}


def _no_mtp(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: the MTP layer was asked for and is not in this checkpoint; load with mtp=False"
    )
