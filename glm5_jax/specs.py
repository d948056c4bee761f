"""What the spec table says about a config: tensors on disk, and leaves of the parameter tree.

The rows themselves are in ``spec_table``; whatever else needs to know a tensor asks here.
No JAX here.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from .config import ModelConfig
from .skeleton import Skeleton, SkeletonLayer
from .spec_table import (
    DENSE,
    DSA,
    EXPERTS,
    HYPER_CONNECTION,
    INDEXER,
    KDA,
    LAYER_NORMS,
    LAYER_PREFIX,
    MLA,
    MOE,
    MTP,
    MTP_COPIES,
    OUTSIDE,
    ROLES,
    ROUTER,
    SHARED,
    TEXT_PREFIX,
    VISION,
    VISION_BLOCK,
    VISION_PREFIX,
    TensorSpec,
)

__all__ = [
    "DENSE",
    "DSA",
    "EXPERTS",
    "HYPER_CONNECTION",
    "INDEXER",
    "KDA",
    "LAYER_NORMS",
    "LAYER_PREFIX",
    "MLA",
    "MOE",
    "MTP",
    "MTP_COPIES",
    "OUTSIDE",
    "PARTS",
    "ROLES",
    "ROUTER",
    "SHARED",
    "TEXT_PREFIX",
    "VISION",
    "VISION_BLOCK",
    "VISION_PREFIX",
    "Leaf",
    "Naming",
    "StoredSpec",
    "TensorSpec",
    "evaluate_shape",
    "layer_leaves",
    "layer_tensors",
    "leaf_path",
    "leaves",
    "native_shape",
    "outside_tensors",
    "stored_rows",
    "stored_tensors",
    "structural_tensors",
    "tensors_of_layer",
    "vision_tensors",
]

Naming = Literal["released", "native"]
Part = Literal["text", "mtp", "vision"]
PARTS: tuple[Part, ...] = get_args(Part)


class StoredSpec(NamedTuple):
    """A tensor that a directory in one naming is expected to hold.

    Native naming fuses: then ``specs`` lists every row of the table it carries, in row order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: Part
    layer: int | None
    expert: int | None
    specs: tuple[TensorSpec, ...]

    @property
    def role(self) -> str:
        """Role of the tensor, the same for everything fused into it."""
        return self.specs[0].role

    @property
    def quantizable(self) -> bool:
        """Whether a release may store it quantised; the fused experts never are."""
        spec = self.specs[0]
        return spec.quantizable and (spec.transform == "copy" or self.expert is not None)


class Leaf(NamedTuple):
    """One array of the parameter tree and the released tensors that make it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    axes: tuple[str | None, ...]
    sources: tuple[str, ...]
    transform: Literal["copy", "concat", "stack"]
    keep_stored: bool


def structural_tensors(layer: SkeletonLayer) -> tuple[TensorSpec, ...]:
    """Rows of a layer without its FFN: attention, norms, hyper-connections, MTP's own.

    23 for a KDA layer, 22 for a DSA layer, 20 for the MTP layer. A layer that reuses the previous
    indexer's choice owns no indexer tensors.
    """
    if layer.mixer == "kda":
        attention = KDA
    else:
        attention = DSA if layer.indexer == "full" else MLA
    hyper = HYPER_CONNECTION if layer.hyper_connection else ()
    return LAYER_NORMS + hyper + attention + (MTP if layer.is_mtp else ())


def layer_tensors(layer: SkeletonLayer) -> tuple[TensorSpec, ...]:
    """Every row of a layer: the structural ones, then its FFN's."""
    return structural_tensors(layer) + (DENSE if layer.mlp == "dense" else MOE)


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


@functools.cache
def _parsed(dim: str) -> ast.expr:
    return ast.parse(dim, mode="eval").body


def _evaluate(node: ast.expr, dims: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return dims[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, dims), _evaluate(node.right, dims)
        return int(_OPERATORS[type(node.op)](left, right))
    raise ValueError(f"a dim is made of +, * and // only: {ast.unparse(node)}")


def evaluate_shape(shape: tuple[str, ...], dims: Mapping[str, int]) -> tuple[int, ...]:
    """Symbolic dims to numbers; ``KeyError`` names a letter that the config lacks."""
    return tuple(_evaluate(_parsed(dim), dims) for dim in shape)


def native_shape(spec: TensorSpec, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the native tensor that carries the row, fused as transformers fuses it."""
    rows, *rest = evaluate_shape(spec.shape, dims)
    fused = (rows * spec.native_part[1], *rest)
    return (dims["E"], *fused) if spec.transform == "stack" else fused


def _stored(
    specs: tuple[TensorSpec, ...],
    dims: Mapping[str, int],
    naming: Naming,
    part: Part,
    layer: int | None,
) -> Iterator[StoredSpec]:
    fused: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if naming == "native" and spec.native is not None:
            fused.setdefault(spec.native, []).append(spec)
            continue
        shape = evaluate_shape(spec.shape, dims)
        name = spec.name.replace("{layer}", str(layer))
        if "{expert}" in name:
            head, tail = name.split("{expert}")
            for expert in range(dims["E"]):
                full = f"{head}{expert}{tail}"
                yield StoredSpec(full, shape, spec.dtype, part, layer, expert, (spec,))
        else:
            yield StoredSpec(name, shape, spec.dtype, part, layer, None, (spec,))
    for template, members in fused.items():
        name = template.replace("{layer}", str(layer))
        shape = native_shape(members[0], dims)
        yield StoredSpec(name, shape, members[0].dtype, part, layer, None, tuple(members))


def outside_tensors(config: ModelConfig) -> Iterator[StoredSpec]:
    """Embedding, final norm and head, alike in both namings."""
    return _stored(OUTSIDE, config.dims, "released", "text", None)


def tensors_of_layer(
    layer: SkeletonLayer, config: ModelConfig, naming: Naming = "released"
) -> Iterator[StoredSpec]:
    """Every stored tensor of one layer with its shape, in one naming."""
    part: Part = "mtp" if layer.is_mtp else "text"
    return _stored(layer_tensors(layer), config.dims, naming, part, layer.index)


def stored_rows(
    rows: tuple[TensorSpec, ...], config: ModelConfig, layer: SkeletonLayer
) -> Iterator[StoredSpec]:
    """Some rows of a layer as stored under released names, whether or not the layer owns them."""
    part: Part = "mtp" if layer.is_mtp else "text"
    return _stored(rows, config.dims, "released", part, layer.index)


def vision_tensors(config: ModelConfig) -> Iterator[StoredSpec]:
    """Every stored tensor of the vision tower; none when the config has no tower."""
    if config.vision is None:
        return
    for block in range(config.vision.depth):
        for spec in VISION_BLOCK:
            name = spec.name.replace("{block}", str(block))
            shape = evaluate_shape(spec.shape, config.dims)
            yield StoredSpec(name, shape, spec.dtype, "vision", None, None, (spec,))
    yield from _stored(VISION, config.dims, "released", "vision", None)


def stored_tensors(
    config: ModelConfig, naming: Naming = "released", mtp: bool = True, vision: bool = True
) -> Iterator[StoredSpec]:
    """Every tensor of an unquantised checkpoint of this config, in checkpoint order.

    ``mtp`` adds the MTP layer if the config has one, ``vision`` the tower if it has one.
    Dtypes are the ones required on disk.
    """
    skeleton = Skeleton.from_config(config)
    yield from outside_tensors(config)
    for layer in skeleton.layers:
        yield from tensors_of_layer(layer, config, naming)
    if mtp and skeleton.mtp is not None:
        yield from tensors_of_layer(skeleton.mtp, config, naming)
    if vision:
        yield from vision_tensors(config)


def leaf_path(spec: TensorSpec, layer: SkeletonLayer | None) -> str:
    """Dotted path of the leaf that a bound row belongs to."""
    if spec.path is None:
        raise ValueError(f"{spec.name} is not bound to a leaf")
    if layer is None:
        return spec.path
    if layer.is_mtp:
        return spec.path.replace("layers.{layer}.", "mtp.layer.")
    return spec.path.replace("{layer}", str(layer.index))


def _group_leaves(
    specs: tuple[TensorSpec, ...], config: ModelConfig, layer: SkeletonLayer | None
) -> Iterator[Leaf]:
    dims = config.dims
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(leaf_path(spec, layer), []).append(spec)
    index = "" if layer is None else str(layer.index)
    for path, members in groups.items():
        spec = members[0]
        shape = evaluate_shape(spec.shape, dims)
        names = tuple(member.name.replace("{layer}", index) for member in members)
        if spec.transform == "concat":
            shape = (len(members) * shape[0], *(n for n in shape[1:-1] if n != 1), shape[-1])
        elif spec.transform == "stack":
            shape = (dims["E"], *shape)
            head, tail = names[0].split("{expert}")
            names = tuple(f"{head}{expert}{tail}" for expert in range(dims["E"]))
        yield Leaf(
            path, shape, spec.dtype, spec.role, spec.axes, names, spec.transform, spec.keep_stored
        )


def layer_leaves(layer: SkeletonLayer, config: ModelConfig) -> dict[str, Leaf]:
    """Leaves of one layer by path; those of the MTP layer lie under ``mtp``."""
    return {leaf.path: leaf for leaf in _group_leaves(layer_tensors(layer), config, layer)}


def leaves(config: ModelConfig, mtp: bool = True) -> dict[str, Leaf]:
    """The whole parameter tree: path to ``Leaf``, layers in order, the MTP block last.

    ``mtp`` adds the MTP block if the config has one.
    """
    skeleton = Skeleton.from_config(config)
    tree = {leaf.path: leaf for leaf in _group_leaves(OUTSIDE, config, None)}
    for layer in skeleton.layers:
        tree |= layer_leaves(layer, config)
    if mtp and skeleton.mtp is not None:
        tree |= layer_leaves(skeleton.mtp, config)
    return tree
