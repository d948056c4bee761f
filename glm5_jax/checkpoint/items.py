"""The arrays of a converted directory: what each is made of, and how it is read piece by piece.

An array is the elements of its tensors one after the other (copied, joined or stacked, which in
memory are one thing), or a quantised leaf decoded. No JAX here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

import numpy as np

from ..errors import CheckpointError
from . import codecs
from .bind import BoundLeaf, read_leaf
from .conveyor import PIECE_BYTES
from .dtypes import decoded_dtype, leaf_dtype
from .header import DTYPES, StoredTensor
from .layouts import ACTIVATION_SCALES
from .ledger import PASSTHROUGH
from .reader import Checkpoint

# An expert of at least this size is a piece of its own, so that one can be read without others.
EXPERT_BYTES = 2**16

Index = slice | EllipsisType


class Origin(NamedTuple):
    """A tensor that an array is made of, or a range of its rows (on axis -2)."""

    tensor: StoredTensor
    rows: tuple[int, int] | None = None


class Piece(NamedTuple):
    """Some of an array, and the bytes that it was made of, by the number of their origin."""

    array: np.ndarray
    sources: list[tuple[int, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Item:
    """One array to store.

    `transform` is the ledger's word for how the array is made of its `origins`. `decoded` is a
    quantised leaf that is stored decoded. `key` is the last word of a quantised leaf's array.
    """

    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    transform: str
    origins: tuple[Origin, ...]
    decoded: BoundLeaf | None = None
    key: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the array as it is stored."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def cast(self) -> bool:
        """Whether the array has other values than its origins, or another dtype."""
        dtypes = {DTYPES[tensor.dtype][1] for tensor, _ in self.origins}
        return self.decoded is not None or dtypes != {self.dtype}

    @property
    def pieces(self) -> list[Index]:
        """The pieces in order, as indices of axis 0; an ellipsis for an array that is one."""
        if 0 in self.shape:
            return []
        if self.piece_shape == self.shape:
            return [...]
        total, rows = self.shape[0], self.piece_shape[0]
        return [slice(first, min(first + rows, total)) for first in range(0, total, rows)]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of a piece, and of a chunk on disk; the last may have fewer rows."""
        whole = self.decoded is not None and self.decoded.transform != "stack"
        if whole or not self.shape or 0 in self.shape:
            return self.shape
        rows, *rest = self.shape
        row = self.nbytes // rows
        if len(self.shape) == 3 and row >= EXPERT_BYTES:
            return (1, *rest)
        count = -(-rows // max(1, PIECE_BYTES // row))
        return (-(-rows // count), *rest)

    def piece_bytes(self, index: Index) -> int:
        """Size of a piece as it is stored."""
        if not isinstance(index, slice):
            return self.nbytes
        return self.nbytes // self.shape[0] * (index.stop - index.start)

    def held_bytes(self, index: Index) -> int:
        """What a piece holds of memory when it is read: itself, and what it is cast from."""
        stored = self.piece_bytes(index)
        if not self.cast:
            return stored
        origins = sum(tensor.nbytes for tensor, _ in self.origins)
        return stored + origins * stored // self.nbytes

    def read(self, checkpoint: Checkpoint, index: Index) -> Piece:
        """One piece, freshly allocated, out of the files; nothing else stays resident.

        Raises CheckpointError for what can't be read, and for a scale that is not finite.
        """
        rows = range(*index.indices(self.shape[0])) if isinstance(index, slice) else None
        if self.decoded is not None:
            return self._decode(checkpoint, self.decoded, rows)
        shape = self.shape if rows is None else (len(rows), *self.shape[1:])
        out = np.empty(shape, self.dtype)
        begin = 0 if rows is None else rows[0] * math.prod(self.shape[1:])
        return Piece(out, list(self._fill(checkpoint, out.reshape(-1), begin)))

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(origin, first flat element of its tensor, count) of all that the array is made of."""
        for number, (tensor, rows) in enumerate(self.origins):
            if rows is None:
                yield number, 0, math.prod(tensor.shape)
                continue
            *experts, fused, width = tensor.shape
            for expert in range(math.prod(experts)):
                yield number, (expert * fused + rows[0]) * width, (rows[1] - rows[0]) * width

    def _fill(
        self, checkpoint: Checkpoint, out: np.ndarray, begin: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Fill `out` with the array's flat elements from `begin` on."""
        at, end = 0, begin + out.size
        for number, start, count in self._runs():
            low, high = max(begin, at), min(end, at + count)
            if low < high:
                tensor = self.origins[number].tensor
                view = out[low - begin : high - begin]
                own = DTYPES[tensor.dtype][1]
                piece = view if own == out.dtype else np.empty(view.shape, own)
                checkpoint.read_into(tensor, piece, start + low - at, once=True)
                if piece is not view:
                    view[...] = piece.astype(out.dtype)
                if self.key is not None:
                    _check_scale(checkpoint, self.key, tensor, piece)
                yield number, piece
            at += count

    def _decode(self, checkpoint: Checkpoint, leaf: BoundLeaf, rows: range | None) -> Piece:
        numbers = {tensor.name: number for number, (tensor, _) in enumerate(self.origins)}
        sources: list[tuple[int, np.ndarray]] = []
        array = read_leaf(
            checkpoint,
            leaf,
            self.dtype,
            experts=rows,
            seen=lambda tensor, stored: sources.append((numbers[tensor.name], stored)),
        )
        return Piece(array, sources)


def _check_scale(checkpoint: Checkpoint, key: str, tensor: StoredTensor, array: np.ndarray) -> None:
    if array.size == math.prod(tensor.shape):
        array = array.reshape(tensor.shape)  # so that a problem has its place
    if problem := codecs.scale_problem(key, array):
        raise CheckpointError(f"{checkpoint.directory / tensor.file}: {tensor.name}: {problem}")


def bound_items(bound: BoundLeaf, dtype: str) -> Iterator[Item]:
    """A plain leaf, a quantised one decoded, or the arrays of one that stays as it is stored."""
    leaf = bound.leaf
    if bound.quantized and (decoded := decoded_dtype(leaf, dtype)) is not None:
        tensors = (t for source in bound.sources for t in source.parts.values())
        transform = "decode" if bound.transform == "copy" else f"decode {bound.transform}"
        origins = tuple(Origin(tensor) for tensor in tensors)
        yield Item(leaf.path, decoded, leaf.shape, transform, origins, bound)
        return
    for array in bound.arrays:
        kept = array.dtype if bound.quantized else leaf_dtype(leaf, array.dtype, dtype)
        origins = tuple(map(_origin, array.sources))
        yield Item(array.path, kept, array.shape, array.transform, origins, None, array.key)


def _origin(source) -> Origin:
    rows = source.rows
    return Origin(source.tensor, None if rows is None else (rows.start, rows.stop))


def carried_items(tensors: Iterable[StoredTensor]) -> Iterator[Item]:
    """Tensors that are not bound, each an array; the scales of activations packed into few.

    A release may have tens of thousands of those. All of one kind and dtype are one array, one
    after the other, in the order in which the ledger lists them with their shapes.
    """
    packs: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        dtype = _array_dtype(tensor)
        kind = tensor.name.rpartition(".")[2]
        if kind in ACTIVATION_SCALES:
            packs.setdefault(f"{PASSTHROUGH}/packed.{kind}.{tensor.dtype}", []).append(tensor)
            continue
        path = f"{PASSTHROUGH}/{tensor.name}"
        yield Item(path, dtype, tensor.shape, "passthrough", (Origin(tensor),))
    for path, members in packs.items():
        size = sum(math.prod(tensor.shape) for tensor in members)
        dtype = _array_dtype(members[0])
        yield Item(path, dtype, (size,), "pack", tuple(map(Origin, members)))


def _array_dtype(tensor: StoredTensor) -> np.dtype:
    dtype = DTYPES[tensor.dtype][1]
    if dtype is None:
        raise CheckpointError(f"{tensor.file}: {tensor.name}: Orbax has no {tensor.dtype} arrays")
    return dtype
