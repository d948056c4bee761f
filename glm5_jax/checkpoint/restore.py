"""Leaves of the model out of a directory: Orbax or safetensors, bit for bit the same.

All at once, or one by one and in parts: experts of a stack, rows of the embedding. Only the bytes
of what is asked for are read. No JAX here.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..config import ModelConfig, load_config
from ..errors import CheckpointError
from ..specs import Leaf, leaves
from . import codecs
from .bind import BoundArray, BoundLeaf, bind, read_box, read_into, read_leaf
from .dtypes import decoded_dtype, dtype_word, leaf_dtype
from .layouts import check_arrays
from .ledger import read_ledger
from .orbax import Part, StoredLeaf, fill_array, is_orbax, stored_leaves
from .reader import INDEX, Box, open_checkpoint

ALIGNMENT = 64  # of arrays that JAX uses where they are, without a copy
PIECE_BYTES = 64 * 2**20  # held beside a leaf while it is cast or decoded

Rows = Sequence[int] | None


def load_leaves(
    path: str | os.PathLike[str], dtype: str = "stored", mtp: bool = False
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The config and every array of the parameter tree by dotted path, layers in numeric order.

    A leaf that stays quantised is the arrays that are stored (``<path>.codes``, ``<path>.scale``,
    ...). Arguments and errors are those of `open_leaves` and `LeafReader.read`.
    """
    reader = open_leaves(path, dtype, mtp)
    return reader.config, reader.read_all()


def open_leaves(
    path: str | os.PathLike[str], dtype: str = "stored", mtp: bool = False
) -> LeafReader:
    """The leaves of a directory, checked against the spec table and not read yet.

    path: an Orbax directory of `convert`, or a safetensors directory (or file) directly.
    dtype: ``stored``, ``bfloat16``, ``float32`` or ``float64``; see `dtypes.leaf_dtype` for what
    stays float32. ``stored`` keeps a quantised leaf quantised, any other dtype decodes it. mtp:
    also the MTP layer, under ``mtp.``.

    Raises CheckpointError, one line, if the directory is neither, unfinished or damaged, if a leaf
    is missing or of another shape, or if the MTP layer is asked for and not there.
    """
    dtype = dtype_word(dtype)
    if dtype == "float64":
        _require_x64()
    path = Path(path)
    if is_orbax(path):
        return OrbaxReader(path.resolve(), dtype, mtp)
    if path.is_file() or (path / INDEX).exists() or any(path.glob("*.safetensors")):
        return SafetensorsReader(path, dtype, mtp)
    raise CheckpointError(
        f"{path}: neither an Orbax directory of `convert` nor a directory of .safetensors files"
    )


def _require_x64() -> None:
    import jax

    if not jax.config.read("jax_enable_x64"):
        raise CheckpointError(
            'dtype float64 needs JAX\'s 64-bit mode: jax.config.update("jax_enable_x64", True) '
            "before any array is made, or JAX_ENABLE_X64=1 in the environment"
        )


class LeafReader(ABC):
    """The leaves of one directory, in one dtype (see `dtypes`); nothing is read until asked for.

    `leaves` is the parameter tree by path. `bytes_read` counts what was read of the weights; out of
    an Orbax directory come whole chunks, of which it counts the parts that were asked for.
    """

    def __init__(self, config: ModelConfig, leaves: dict[str, Leaf], dtype: str):
        self.config = config
        self.leaves = leaves
        self.dtype = dtype
        self.bytes_read = 0
        self._block = None if config.quantization is None else config.quantization.weight_block_size

    def read(self, path: str, rows: Rows = None, room: int | None = None) -> dict[str, np.ndarray]:
        """A leaf by path, or the arrays of one that stays quantised (``<path>.codes``, ...).

        rows: only those of the first axis, in this order. room: how many rows the arrays have, at
        least as many as are read; what lies behind those is not filled. Raises CheckpointError, one
        line, for what cannot be read and for scales that are not finite.
        """
        decodes = self._decodes(path)
        stored = {} if decodes else self._stored(path)
        found = {}
        for name, (shape, dtype) in self.arrays(path).items():
            out, part = _empty(shape, dtype, rows, room)
            key = _key(path, name)
            if decodes:
                for piece, some in _pieces(part, rows):
                    self._decode(piece, path, some)
            elif dtype == stored[key].dtype:
                self._fill(part, path, key, rows)
            else:
                for piece, some in _pieces(part, rows):
                    raw = np.empty(piece.shape, stored[key].dtype)
                    self._fill(raw, path, key, some)
                    piece[...] = raw.astype(dtype)
            found[name] = out
        return found

    def read_all(self) -> dict[str, np.ndarray]:
        """What `read` gives of every leaf, layers in numeric order."""
        return {name: array for path in self.leaves for name, array in self.read(path).items()}

    def read_box(self, path: str, name: str, box: Box) -> np.ndarray:
        """A part, (first, end) of every dimension, of the array `name` that `read` gives of a leaf.

        Nothing else is read. Errors are those of `read`; a part of what is decoded begins and ends
        where the block of a scale does.
        """
        shape, dtype = self.arrays(path)[name]
        out, _ = _empty(tuple(end - first for first, end in box), dtype, None, None)
        decodes, raw = self._decodes(path), {}
        for key, array in self._stored(path).items():
            if decodes or key == _key(path, name):
                part = tuple(
                    (0, n) if n == 1 else (first * n // whole, -(-end * n // whole))
                    for n, whole, (first, end) in zip(array.shape, shape, box, strict=False)
                )
                raw[key] = np.empty([end - first for first, end in part], array.dtype)
                self._fill_box(raw[key], path, key, part)
        if decodes:
            codecs.decode(raw, self._block, dtype, out)
        else:
            out[...] = raw[_key(path, name)].astype(dtype)
        return out

    def arrays(self, path: str) -> dict[str, StoredLeaf]:
        """Shape and dtype of the arrays, by path, that `read` gives of a leaf."""
        leaf = self.leaves[path]
        if self._quantized(path) and (decoded := decoded_dtype(leaf, self.dtype)) is not None:
            return {path: StoredLeaf(leaf.shape, decoded)}
        return {
            f"{path}.{key}" if key else path: StoredLeaf(
                array.shape, array.dtype if key else leaf_dtype(leaf, array.dtype, self.dtype)
            )
            for key, array in self._stored(path).items()
        }

    def _decodes(self, path: str) -> bool:
        return self._quantized(path) and self.dtype != "stored"

    def dtype_of(self, path: str) -> np.dtype:
        """The dtype in which `read` gives a leaf that is not quantised."""
        return leaf_dtype(self.leaves[path], self._stored(path)[""].dtype, self.dtype)

    @abstractmethod
    def _quantized(self, path: str) -> bool:
        """Whether any part of a leaf is stored quantised."""

    @abstractmethod
    def _stored(self, path: str) -> Mapping[str, StoredLeaf]:
        """The arrays that a leaf is stored as, by key; a plain one is of key ""."""

    @abstractmethod
    def _fill(self, out: np.ndarray, path: str, key: str, rows: Rows) -> None:
        """Read one of those, or rows of it, into an array of its dtype."""

    @abstractmethod
    def _fill_box(self, out: np.ndarray, path: str, key: str, box: Box) -> None:
        """Read a part of one of those."""

    @abstractmethod
    def _decode(self, out: np.ndarray, path: str, rows: Rows) -> None:
        """Read a quantised leaf, or some experts of it, decoded."""


class SafetensorsReader(LeafReader):
    """Leaves straight from safetensors files, in any naming and layout."""

    def __init__(self, path: Path, dtype: str, mtp: bool):
        self._checkpoint = open_checkpoint(path)
        config = self._checkpoint.config
        self._bound: dict[str, BoundLeaf] = bind(self._checkpoint, config, mtp=mtp)
        super().__init__(config, {name: bound.leaf for name, bound in self._bound.items()}, dtype)
        if mtp and not any(name.startswith("mtp.") for name in self.leaves):
            raise _no_mtp(path)
        if dtype == "stored":
            for bound in self._bound.values():
                bound.arrays  # noqa: B018 - refuses experts that are not all stored in one way

    def _quantized(self, path: str) -> bool:
        return self._bound[path].quantized

    def _stored(self, path: str) -> Mapping[str, StoredLeaf]:
        arrays = self._bound[path].arrays
        return {array.key or "": StoredLeaf(array.shape, array.dtype) for array in arrays}

    def _fill(self, out: np.ndarray, path: str, key: str, rows: Rows) -> None:
        read_into(self._checkpoint, self._array(path, key), out, rows)
        self.bytes_read += out.nbytes

    def _fill_box(self, out: np.ndarray, path: str, key: str, box: Box) -> None:
        read_box(self._checkpoint, self._array(path, key), out, box)
        self.bytes_read += out.nbytes

    def _array(self, path: str, key: str) -> BoundArray:
        (array,) = (array for array in self._bound[path].arrays if (array.key or "") == key)
        return array

    def _decode(self, out: np.ndarray, path: str, rows: Rows) -> None:
        def count(_: object, array: np.ndarray) -> None:
            self.bytes_read += array.nbytes

        out[...] = read_leaf(self._checkpoint, self._bound[path], out.dtype, rows, count)


class OrbaxReader(LeafReader):
    """Leaves out of an Orbax directory of `convert`."""

    def __init__(self, path: Path, dtype: str, mtp: bool):
        self._directory = path.resolve()
        config = load_config(path)
        self._arrays = stored_leaves(path)
        if mtp and not any(name.startswith("mtp.") for name in self._arrays):
            raise _no_mtp(path)
        # What is stored decides whether there is an MTP layer; a config may be silent about it.
        expected = leaves(replace(config, num_nextn_predict_layers=1), mtp=mtp)
        super().__init__(config, expected, dtype)
        self._keys = _check_tree(path, expected, self._arrays, self._block)

    def _quantized(self, path: str) -> bool:
        return "" not in self._keys[path]

    def _stored(self, path: str) -> Mapping[str, StoredLeaf]:
        return {key: self._arrays[array] for key, array in self._keys[path].items()}

    def _fill(self, out: np.ndarray, path: str, key: str, rows: Rows) -> None:
        self._fill_part(out, path, key, None if rows is None else list(rows))

    def _fill_box(self, out: np.ndarray, path: str, key: str, box: Box) -> None:
        self._fill_part(out, path, key, tuple(slice(*ends) for ends in box))

    def _fill_part(self, out: np.ndarray, path: str, key: str, part: Part) -> None:
        array = self._keys[path][key]
        fill_array(self._directory, array, out, part)
        if problem := codecs.scale_problem(key, out) if key else None:
            raise CheckpointError(f"{self._directory}: {array}: {problem}")
        self.bytes_read += out.nbytes

    def _decode(self, out: np.ndarray, path: str, rows: Rows) -> None:
        arrays = {}
        for key, stored in self._stored(path).items():
            shape = stored.shape if rows is None else (len(rows), *stored.shape[1:])
            arrays[key] = np.empty(shape, stored.dtype)
            self._fill(arrays[key], path, key, rows)
        codecs.decode(arrays, self._block, out.dtype, out)


def _key(path: str, name: str) -> str:
    """Of an array's path: what stands behind that of its leaf."""
    return name[len(path) + 1 :]


def _empty(
    shape: tuple[int, ...], dtype: np.dtype, rows: Rows, room: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """An array on a boundary of `ALIGNMENT` bytes, and the part of it that is to be filled."""
    if rows is not None:
        shape = (len(rows) if room is None else room, *shape[1:])
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    out = raw[start : start + nbytes].view(dtype).reshape(shape)
    return out, out if rows is None else out[: len(rows)]


def _pieces(out: np.ndarray, rows: Rows) -> Iterator[tuple[np.ndarray, Rows]]:
    """An array and the rows that go into it, cut into pieces; a whole matrix is one."""
    if rows is None and out.ndim < 3:
        yield out, None
        return
    rows = range(len(out)) if rows is None else rows
    step = max(1, PIECE_BYTES * len(rows) // max(1, out.nbytes))
    for start in range(0, len(rows), step):
        yield out[start : start + step], rows[start : start + step]


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
            f"{missing[0]}{_why_missing(directory)}"
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


def _why_missing(directory: Path) -> str:
    try:
        layers = read_ledger(directory)[0].layers
    except CheckpointError:
        return "; it was not written by `glm5-jax convert`, or has lost its ledger"
    if layers is None:
        return "; `glm5-jax verify` tells what is damaged"
    return f"; only layers {', '.join(map(str, layers))} were converted (--layers)"


def _array_paths(path: str, stored: dict[str, StoredLeaf]) -> dict[str, str]:
    if path in stored:
        return {"": path}
    named = ((key, f"{path}.{key}") for key in codecs.KEYS)
    return {key: array for key, array in named if array in stored}


def _no_mtp(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: the MTP layer was asked for and is not in this checkpoint; load with mtp=False"
    )
