"""Stored tensors → leaves of the parameter tree, planned first, then read one leaf at a time.

The only transforms are those of the spec table: concatenate q | k | v, stack experts, squeeze.
Native fused tensors are the same leaves read as row ranges. No JAX here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .. import specs
from ..config import ModelConfig
from ..errors import CheckpointError
from ..skeleton import SkeletonLayer
from ..specs import Leaf
from .header import DTYPES, StoredTensor
from .layouts import released_prefix
from .match import Entry, match, resolve_layers
from .reader import Checkpoint

SHOWN = 3  # faults that the one-line error quotes


class BoundSource(NamedTuple):
    """A stored tensor, whole, or a range of its rows (axis −2) out of a native fused tensor."""

    tensor: StoredTensor
    rows: slice | None = None


@dataclass(frozen=True, slots=True)
class BoundLeaf:
    """A leaf and where its bytes are.

    `transform`: `copy` has one source; `concat` joins sources on axis 0, `stack` on a new axis 0.
    """

    leaf: Leaf
    sources: tuple[BoundSource, ...]
    transform: Literal["copy", "concat", "stack"]

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype; the widest when sources differ, so that nothing is narrowed."""
        dtypes = {DTYPES[source.tensor.dtype][1] for source in self.sources}
        widest = dtypes.pop() if len(dtypes) == 1 else DTYPES["F32"][1]
        assert widest is not None
        return widest

    @property
    def nbytes(self) -> int:
        """Size of the leaf in its stored dtype."""
        return int(np.prod(self.leaf.shape, dtype=np.int64)) * self.dtype.itemsize


def bind(
    checkpoint: Checkpoint,
    config: ModelConfig,
    mtp: bool = True,
    layers: str | Collection[int] | None = None,
    allow_bf16: bool = False,
) -> dict[str, BoundLeaf]:
    """Path → `BoundLeaf` for the whole tree, in the order of `specs.leaves`.

    `mtp` binds the MTP layer if the checkpoint has one (no path begins with `mtp.` if not).
    `layers` binds the tensors outside the layers and those layers only. Raises CheckpointError,
    one line with the first faults, unless everything asked for is there and nothing is unknown,
    and for quantised weights, which can be audited but not bound.
    """
    found = match(checkpoint, config, layers=layers, mtp=mtp, allow_bf16=allow_bf16)
    if not found.complete:
        faults = found.problems()
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.directory}: {'; '.join(faults[:SHOWN])}{more}; "
            f"run `glm5-jax audit` for all of it"
        )
    for entry in found.entries:
        if entry.scheme is not None:
            raise CheckpointError(
                f"{checkpoint.directory / entry.tensor.file}: {entry.tensor.name} is stored as "
                f"{entry.scheme}; quantised layouts can be audited, converting them is not "
                f"supported yet; use the BF16 release"
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
    return {path: _bound(leaf, tuple(plan[path])) for path, leaf in tree.items() if path in plan}


def _sources(entry: Entry, layer: SkeletonLayer | None) -> Iterator[tuple[str, BoundSource]]:
    """Leaves that one stored tensor feeds: one, or two for the fused gate and up projections."""
    rows = entry.spec.specs
    if rows[0].path is None:
        return
    if rows[0].transform == "concat" or entry.spec.expert is not None or len(rows) == 1:
        # A fused convolution already is the concatenation that its leaf wants.
        yield specs.leaf_path(rows[0], layer), BoundSource(entry.tensor)
        return
    for row in rows:
        index, count = row.native_part
        height = entry.tensor.shape[-2] // count
        part = slice(index * height, (index + 1) * height)
        yield specs.leaf_path(row, layer), BoundSource(entry.tensor, part)


def _bound(leaf: Leaf, sources: tuple[BoundSource, ...]) -> BoundLeaf:
    # One expert alone still has to gain the expert axis; one fused tensor has it already.
    stacks = leaf.transform == "stack" and len(sources[0].tensor.shape) < len(leaf.shape)
    joins = leaf.transform == "concat" and len(sources) > 1
    return BoundLeaf(leaf, sources, "stack" if stacks else "concat" if joins else "copy")


def read_leaf(checkpoint: Checkpoint, bound: BoundLeaf) -> np.ndarray:
    """The leaf in its stored dtype, freshly allocated; nothing else stays resident."""
    out = np.empty(bound.leaf.shape, bound.dtype)
    read_into(checkpoint, bound, out)
    return out


def read_into(checkpoint: Checkpoint, bound: BoundLeaf, out: np.ndarray) -> None:
    """Fill `out` (C-contiguous, of the leaf's shape and `bound.dtype`) source by source."""
    if out.shape != bound.leaf.shape or out.dtype != bound.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"{bound.leaf.path}: out must be contiguous {bound.dtype} {list(bound.leaf.shape)}, "
            f"got {out.dtype} {list(out.shape)}"
        )
    for target, tensor, start in _pieces(bound, out):
        stored = DTYPES[tensor.dtype][1]
        if stored == out.dtype:
            checkpoint.read_into(tensor, target, start)
        else:
            piece = np.empty(target.shape, stored)
            checkpoint.read_into(tensor, piece, start)
            target[...] = piece.astype(out.dtype)


def _pieces(bound: BoundLeaf, out: np.ndarray) -> Iterator[tuple[np.ndarray, StoredTensor, int]]:
    """(view of `out`, tensor, first flat element) of every contiguous run of bytes."""
    first = 0
    for index, (tensor, rows) in enumerate(bound.sources):
        if bound.transform == "stack":
            yield out[index], tensor, 0
        elif bound.transform == "concat":
            height = tensor.shape[0]
            yield out[first : first + height], tensor, 0
            first += height
        elif rows is None:
            yield out, tensor, 0
        else:
            *_, fused, width = tensor.shape
            for expert in range(tensor.shape[0]):
                yield out[expert], tensor, (expert * fused + rows.start) * width


def passthrough(
    checkpoint: Checkpoint,
    config: ModelConfig,
    mtp: bool = True,
    layers: str | Collection[int] | None = None,
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
