"""Stored tensors → leaves of the parameter tree, planned first, then read one leaf at a time.

The only transforms are those of the spec table: concatenate q | k | v, stack experts, squeeze.
Native fused tensors are the same leaves read as row ranges. A quantised leaf is a set of plain
arrays (`BoundLeaf.arrays`), to be read as they are or decoded on the way. No JAX here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .. import specs
from ..config import ModelConfig
from ..errors import CheckpointError
from ..skeleton import SkeletonLayer
from ..specs import Leaf
from . import codecs
from .header import DTYPES, StoredTensor
from .layouts import ARRAY_KEYS, Scheme, released_prefix
from .match import Entry, Layers, match, resolve_layers
from .reader import Box, Checkpoint

SHOWN = 3  # faults that the one-line error quotes


Transform = Literal["copy", "concat", "stack"]
Seen = Callable[[StoredTensor, np.ndarray], None]


class BoundSource(NamedTuple):
    """A stored weight: a plain tensor, or codes with their scales.

    `rows` is a range (on axis −2) out of a native fused tensor, which is never quantised.
    """

    tensor: StoredTensor
    rows: slice | None = None
    scheme: Scheme | None = None
    scales: tuple[StoredTensor, ...] = ()

    @property
    def parts(self) -> dict[str, StoredTensor]:
        """The tensors of a quantised weight by array key: codes, scale, ..."""
        return {ARRAY_KEYS[t.name.rpartition(".")[2]]: t for t in (self.tensor, *self.scales)}


@dataclass(frozen=True, slots=True)
class BoundArray:
    """One array in the form in which it is stored, and where its bytes are.

    `path` is a plain leaf's own, or that of a quantised leaf with `.codes`, `.scale`, ... behind;
    `key` is that last word, None for a plain leaf. `transform`: `copy` has one source; `concat`
    joins sources on axis 0, `stack` on a new axis 0.
    """

    path: str
    shape: tuple[int, ...]
    sources: tuple[BoundSource, ...]
    transform: Transform
    key: str | None = None

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype; the widest when sources differ, so that nothing is narrowed."""
        dtypes = {DTYPES[source.tensor.dtype][1] for source in self.sources}
        widest = dtypes.pop() if len(dtypes) == 1 else DTYPES["F32"][1]
        assert widest is not None
        return widest

    @property
    def nbytes(self) -> int:
        """Size of the array in its stored dtype."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BoundLeaf:
    """A leaf and the stored weights that make it, one, or one for each expert of a stack.

    `arrays` is the leaf in the form in which it is stored. `read_leaf` gives it decoded.
    """

    leaf: Leaf
    sources: tuple[BoundSource, ...]
    transform: Transform
    block: tuple[int, int] | None = None

    @property
    def quantized(self) -> bool:
        """Whether any weight in it is stored quantised."""
        return any(source.scheme is not None for source in self.sources)

    @property
    def arrays(self) -> tuple[BoundArray, ...]:
        """The plain leaf as one array, or the arrays of a quantised one: codes and scales.

        Raises CheckpointError if the experts of a stack are not all quantised in one way: then
        there are no such arrays, and the leaf can only be decoded.
        """
        if not self.quantized:
            return (BoundArray(self.leaf.path, self.leaf.shape, self.sources, self.transform),)
        first, *others = self.sources
        for other in others:
            if _form(other) != _form(first):
                raise CheckpointError(
                    f"{self.leaf.path}: {first.tensor.name} is {_told(first)} and "
                    f"{other.tensor.name} is {_told(other)}; experts that are not all stored in "
                    f"one way can't be stacked as they are, ask for them decoded (dtype bfloat16)"
                )
        arrays = []
        parts = [source.parts for source in self.sources]
        for key, tensor in parts[0].items():
            shape = (len(parts), *tensor.shape) if self.transform == "stack" else tensor.shape
            sources = tuple(BoundSource(part[key]) for part in parts)
            path = f"{self.leaf.path}.{key}"
            arrays.append(BoundArray(path, shape, sources, self.transform, key))
        return tuple(arrays)

    @property
    def nbytes(self) -> int:
        """Size of all its tensors on disk."""
        return sum(t.nbytes for source in self.sources for t in (source.tensor, *source.scales))


def _form(source: BoundSource) -> object:
    parts = source.parts if source.scheme else {"": source.tensor}
    return source.scheme, [(key, t.dtype, t.shape) for key, t in parts.items()]


def _told(source: BoundSource) -> str:
    tensors = (source.tensor, *source.scales)
    form = " with ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    return f"{source.scheme or 'plain'} ({form})"


def bind(
    checkpoint: Checkpoint,
    config: ModelConfig,
    mtp: bool = True,
    layers: Layers = None,
    allow_bf16: bool = False,
) -> dict[str, BoundLeaf]:
    """Path → `BoundLeaf` for the whole tree, in the order of `specs.leaves`.

    `mtp` binds the MTP layer if the checkpoint has one (no path begins with `mtp.` if not).
    `layers` binds the tensors outside the layers and those layers only. Raises CheckpointError,
    one line with the first faults, unless everything asked for is there and nothing is unknown.
    """
    found = match(checkpoint, config, layers=layers, mtp=mtp, allow_bf16=allow_bf16)
    if not found.complete:
        faults = found.problems()
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.directory}: {'; '.join(faults[:SHOWN])}{more}; "
            f"run `glm5-jax audit` for all of it"
        )
    chosen = resolve_layers(layers, config)
    plan: dict[str, list[BoundSource]] = {}
    for entry in found.entries:
        index = entry.spec.layer
        declined = entry.spec.part == "vision" or (entry.spec.part == "mtp" and not mtp)
        if not declined and (chosen is None or index is None or index in chosen):
            layer = found.mtp if entry.spec.part == "mtp" else found.layers.get(index or 0)
            for path, source in _sources(entry, None if index is None else layer):
                plan.setdefault(path, []).append(source)

    tree = specs.leaves(config, mtp=False)
    if found.mtp is not None and mtp:
        tree |= specs.layer_leaves(found.mtp, config)
    block = None if config.quantization is None else config.quantization.weight_block_size
    return {
        path: _bound(leaf, tuple(plan[path]), block) for path, leaf in tree.items() if path in plan
    }


def _sources(entry: Entry, layer: SkeletonLayer | None) -> Iterator[tuple[str, BoundSource]]:
    """Leaves that one stored tensor feeds: one, or two for the fused gate and up projections."""
    rows = entry.spec.specs
    if rows[0].path is None:
        return
    if rows[0].transform == "concat" or entry.spec.expert is not None or len(rows) == 1:
        # A fused convolution already is the concatenation that its leaf wants.
        source = BoundSource(entry.tensor, None, entry.scheme, entry.scales)
        yield specs.leaf_path(rows[0], layer), source
        return
    for row in rows:
        index, count = row.native_part
        height = entry.tensor.shape[-2] // count
        part = slice(index * height, (index + 1) * height)
        yield specs.leaf_path(row, layer), BoundSource(entry.tensor, part)


def _bound(
    leaf: Leaf, sources: tuple[BoundSource, ...], block: tuple[int, int] | None
) -> BoundLeaf:
    # One expert alone still has to gain the expert axis; one fused tensor has it already.
    stacks = leaf.transform == "stack" and len(sources[0].tensor.shape) < len(leaf.shape)
    joins = leaf.transform == "concat" and len(sources) > 1
    return BoundLeaf(leaf, sources, "stack" if stacks else "concat" if joins else "copy", block)


def read_leaf(
    checkpoint: Checkpoint,
    bound: BoundLeaf,
    dtype: np.dtype | None = None,
    experts: Sequence[int] | None = None,
    seen: Seen | None = None,
) -> np.ndarray:
    """The leaf in `dtype`, decoded if it is quantised; a plain one as stored by default.

    experts: only those of a stack, in this order. seen: called with each tensor of a quantised leaf
    and its array, as it is read. One expert is held in its stored form at a time, and nothing stays
    resident. Raises CheckpointError for a scale that is not finite.
    """
    if not bound.quantized:
        (array,) = bound.arrays
        return read_array(checkpoint, array, experts).astype(dtype or array.dtype, copy=False)
    if dtype is None:
        raise ValueError(f"{bound.leaf.path}: a quantised leaf is decoded to a dtype; name one")
    if bound.transform != "stack":
        if experts is not None:
            raise ValueError(f"{bound.leaf.path}: has no experts")
        out = np.empty(bound.leaf.shape, dtype)
        _decode(checkpoint, bound, bound.sources[0], out, seen)
        return out
    chosen = range(len(bound.sources)) if experts is None else experts
    out = np.empty((len(chosen), *bound.leaf.shape[1:]), dtype)
    for place, index in enumerate(chosen):
        _decode(checkpoint, bound, bound.sources[index], out[place], seen)
    return out


def _decode(
    checkpoint: Checkpoint,
    bound: BoundLeaf,
    source: BoundSource,
    out: np.ndarray,
    seen: Seen | None,
) -> None:
    """Fill `out` with the weight that one source stands for."""
    arrays = {}
    for key, tensor in source.parts.items():
        array = np.empty(tensor.shape, DTYPES[tensor.dtype][1])
        checkpoint.read_into(tensor, array)
        _check_scale(checkpoint, key, tensor, array)
        if seen is not None:
            seen(tensor, array)
        arrays[key] = array
    if source.scheme is None:
        out[...] = arrays["codes"].astype(out.dtype)
    else:
        codecs.decode(arrays, bound.block, out.dtype, out)


def read_array(
    checkpoint: Checkpoint, array: BoundArray, experts: Sequence[int] | None = None
) -> np.ndarray:
    """An array in its stored dtype, freshly allocated; nothing else stays resident.

    experts: only those of a stack, or only those rows of a plain matrix, in this order. Raises
    CheckpointError for a scale that is not finite.
    """
    shape = array.shape if experts is None else (len(experts), *array.shape[1:])
    out = np.empty(shape, array.dtype)
    read_into(checkpoint, array, out, experts)
    return out


def read_into(
    checkpoint: Checkpoint,
    array: BoundArray,
    out: np.ndarray,
    experts: Sequence[int] | None = None,
) -> None:
    """`read_array` into `out`, C-contiguous, of the array's shape and dtype, source by source."""
    shape = array.shape if experts is None else (len(experts), *array.shape[1:])
    if out.shape != shape or out.dtype != array.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"{array.path}: out must be contiguous {array.dtype} {list(shape)}, "
            f"got {out.dtype} {list(out.shape)}"
        )
    for target, tensor, start in _pieces(array, out, experts):
        stored = DTYPES[tensor.dtype][1]
        if stored == out.dtype:
            checkpoint.read_into(tensor, target, start)
        else:
            piece = np.empty(target.shape, stored)
            checkpoint.read_into(tensor, piece, start)
            target[...] = piece.astype(out.dtype)
        if array.key is not None:
            _check_scale(checkpoint, array.key, tensor, target)


def read_box(checkpoint: Checkpoint, array: BoundArray, out: np.ndarray, box: Box) -> None:
    """Fill `out`, of the array's dtype, with a part of it; only the bytes of that are read.

    Raises CheckpointError for a scale that is not finite.
    """
    for target, source, part in _boxes(array, out, box):
        stored = DTYPES[source.dtype][1]
        piece = target if stored == out.dtype else np.empty(target.shape, stored)
        checkpoint.read_box(source, piece, part)
        if piece is not target:
            target[...] = piece.astype(out.dtype)
        if array.key is not None:
            _check_scale(checkpoint, array.key, source, target)


def _boxes(
    array: BoundArray, out: np.ndarray, box: Box
) -> Iterator[tuple[np.ndarray, StoredTensor, Box]]:
    """(view of `out`, tensor, part of the tensor) for every source that a part touches."""
    if array.transform == "stack":
        for place, index in enumerate(range(*box[0])):
            yield out[place, ...], array.sources[index].tensor, box[1:]
        return
    begin, (first, end) = 0, box[0]
    for source in array.sources:
        # A native fused tensor is cut on axis -2, which a concatenated one has not.
        shape, rows = list(source.tensor.shape), source.rows
        height = shape[0]
        low, high = max(first, begin), min(end, begin + height)
        if low < high:
            part = [(low - begin, high - begin), *box[1:]]
            if rows is not None:
                above = part[-2]
                part[-2] = (above[0] + rows.start, above[1] + rows.start)
            # The convolution's unit axis is squeezed out of the leaf.
            while len(part) < len(shape):
                part.insert(1, (0, 1))
            target = out[low - first : high - first]
            yield target.reshape([b - a for a, b in part]), source.tensor, tuple(part)
        begin += height


def _pieces(
    array: BoundArray, out: np.ndarray, experts: Sequence[int] | None
) -> Iterator[tuple[np.ndarray, StoredTensor, int]]:
    """(view of `out`, tensor, first flat element) of every contiguous run of bytes."""
    tensor, rows, *_ = array.sources[0]
    if array.transform == "stack":
        for place, index in enumerate(range(len(out)) if experts is None else experts):
            # An ellipsis, lest the one element of an expert's scale is a number and no view.
            yield out[place, ...], array.sources[index].tensor, 0
    elif array.transform == "copy" and (experts is not None or rows is not None):
        size = math.prod(tensor.shape[1:])
        first = 0 if rows is None else rows.start * tensor.shape[-1]
        for place, index in enumerate(range(len(out)) if experts is None else experts):
            yield out[place, ...], tensor, index * size + first
    elif array.transform == "concat":
        if experts is not None:
            raise ValueError(f"{array.path}: is made of several tensors, read it whole")
        start = 0
        for source in array.sources:
            height = source.tensor.shape[0]
            yield out[start : start + height], source.tensor, 0
            start += height
    else:
        yield out, tensor, 0


def _check_scale(checkpoint: Checkpoint, key: str, tensor: StoredTensor, array: np.ndarray) -> None:
    if problem := codecs.scale_problem(key, array):
        raise CheckpointError(f"{checkpoint.directory / tensor.file}: {tensor.name}: {problem}")


def passthrough(
    checkpoint: Checkpoint,
    config: ModelConfig,
    mtp: bool = True,
    layers: Layers = None,
) -> dict[str, StoredTensor]:
    """Name → tensor of all that is known and never bound, to be carried verbatim.

    The vision tower, activation scales, unused indexers and the MTP layer's copies of embedding and
    head. A declined MTP layer isn't carried, nor anything of layers that aren't in `layers`.
    """
    found = match(checkpoint, config, layers=layers, mtp=mtp, allow_bf16=True)
    chosen = resolve_layers(layers, config)
    left_out = {config.num_hidden_layers} if not mtp else set()
    if chosen is not None:
        left_out |= set(range(config.num_hidden_layers + 1)) - chosen
    prefixes = tuple(specs.LAYER_PREFIX.format(layer=index) for index in left_out)
    names = [name for listed in found.ignored.values() for name in listed]
    return {
        name: checkpoint.tensors[name]
        for name in names
        if not prefixes or not released_prefix(name).startswith(prefixes)
    }
