"""From the logical axes of the spec table to the axes of a device mesh.

The table says what every axis of a leaf means (`vocab`, `heads`, `experts`, ...), `ShardingRules`
along which mesh axes that meaning is cut. What follows is data: which part of a leaf each device
has. JAX is imported where a mesh of devices is at hand; rules and sizes do without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from .config import ModelConfig
from .errors import ConfigError
from .specs import Leaf, leaves

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding

    from .checkpoint.reader import Box
    from .checkpoint.restore import LeafReader

Axes = tuple[str, ...]
MeshShape = Mapping[str, int]  # size by axis name
Pieces = tuple[Axes, ...]  # of every dimension of an array, the mesh axes that cut it

# What must divide evenly, by logical axis: the dims of `ModelConfig.dims` that it runs over. A
# head's own width is never cut, so it is the heads that count. The others have no axis of their
# own: they are small, or all of them is needed everywhere.
CUT_BY: Mapping[str, tuple[str, ...]] = {
    "vocab": ("Vo",),
    "embed": ("X",),
    "heads": ("A",),
    "kda_heads": ("H",),
    "mlp": ("F", "Is"),
    "expert_mlp": ("I",),
    "experts": ("E",),
}


def as_axes(given: str | Axes | None) -> Axes:
    """The axes that are given as one, several or none."""
    return (given,) if isinstance(given, str) else tuple(given or ())


@dataclass(frozen=True)
class ShardingRules:
    """Along which mesh axes each logical axis is cut: a name, several (major first), or ().

    A mesh that lacks an axis is as one that has it with size 1. What is not named here is whole on
    every device: the indexer, the hyper-connections, the convolution, whose rows are those of q, k
    and v behind one another.

    vocab: the rows of the embedding and of the head.
    embed: the hidden size, in weights alone: they are gathered where they are used (FSDP).
    heads, kda_heads: the heads of DSA and of KDA.
    mlp: the width of the dense MLP and of the shared expert.
    expert_mlp, experts: the width of a routed expert, and which experts.
    batch: rows of a batch, in activations and caches. Where they are cut along the axis of the
    experts, the devices do different rows in the mixers and share their tokens in the experts.
    sequence: the tokens of a row, in activations (context parallelism), where they come out even:
    not in decoding, which has one. KDA sends the columns that its convolution looks back at and
    what a device's tokens do to the state; DSA gathers latents, index keys and their gates; experts
    on the same axis gather tokens as for `batch`. For a cache the last columns and the states are
    summed, and the hidden states moved to where padding on the left had them. In no preset.
    """

    vocab: str | Axes = ()
    embed: str | Axes = ()
    heads: str | Axes = ()
    kda_heads: str | Axes = ()
    mlp: str | Axes = ()
    expert_mlp: str | Axes = ()
    experts: str | Axes = ()
    batch: str | Axes = "data"
    sequence: str | Axes = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            axes = as_axes(given) if isinstance(given, str | tuple) else (given,)
            if not all(isinstance(axis, str) for axis in axes) or len(set(axes)) < len(axes):
                raise ConfigError(
                    f"{field.name}: expected the name of a mesh axis, or a tuple of different "
                    f"ones, got {given!r}"
                )

    def axes(self, logical: str | None) -> Axes:
        """The mesh axes of a logical axis, none for one that is never cut."""
        return as_axes(getattr(self, logical, ()) if logical else ())

    def pieces(self, axes: Sequence[str | None], mesh: MeshShape) -> Pieces:
        """Of every dimension of an array with these logical axes, the mesh axes that cut it."""
        return tuple(self.cuts(axis, mesh) for axis in axes)

    def cuts(self, logical: str | None, mesh: MeshShape) -> Axes:
        """The axes of a mesh that cut a logical axis."""
        return tuple(axis for axis in self.axes(logical) if mesh.get(axis, 1) > 1)

    def parts(self, logical: str, mesh: MeshShape) -> int:
        """Into how many parts a mesh cuts a logical axis."""
        return parts_of(self.cuts(logical, mesh), mesh)

    def cut(self, size: int, logical: str | None, mesh: MeshShape) -> Axes:
        """The axes of a mesh that cut a dimension of an activation or a cache.

        None where it does not come out even: a batch of one row is whole on all devices.
        """
        cuts = self.cuts(logical, mesh)
        return cuts if size % parts_of(cuts, mesh) == 0 else ()

    def share(self, size: int, logical: str, mesh: MeshShape) -> int:
        """How much of such a dimension a device has."""
        return size // parts_of(self.cut(size, logical, mesh), mesh)


_TENSOR = dict(vocab="tensor", heads="tensor", kda_heads="tensor", mlp="tensor")
_ROWS = ("data", "expert")
PRESETS: Mapping[str, ShardingRules] = {
    "tp": ShardingRules(**_TENSOR, expert_mlp="tensor"),
    "ep": ShardingRules(experts="expert", batch=_ROWS),
    "tp_ep": ShardingRules(**_TENSOR, expert_mlp="tensor", experts="expert", batch=_ROWS),
    "fsdp": ShardingRules(embed="data"),
}


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes that `tensor=8,expert=2` says, by axis name, in the order in which they stand.

    Raises ConfigError, one line, for anything else.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in mesh:
            raise ConfigError(
                f"mesh: expected NAME=N,... (tensor=8,expert=2), each name once, got {text!r}"
            )
        mesh[name] = int(size)
    return mesh


def parts_of(axes: Axes, mesh: MeshShape) -> int:
    """Into how many parts a mesh cuts what is cut along these of its axes."""
    return math.prod(mesh[axis] for axis in axes)


def find_rules(rules: ShardingRules | str | None) -> ShardingRules:
    """Rules as given, those of a preset by name, or `tp_ep`, which suits any mesh."""
    if isinstance(rules, ShardingRules):
        return rules
    name = "tp_ep" if rules is None else rules
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"rules: expected ShardingRules or {', '.join(PRESETS)}, got {rules!r}")
    return PRESETS[name]


def check_rules(rules: ShardingRules, config: ModelConfig, mesh: MeshShape) -> None:
    """Raise ConfigError, one line, for a cut that does not come out even.

    Also for a mesh axis that no rule names, over which all would be computed several times, and for
    one that would cut two dimensions of one array.
    """
    used: set[str] = set()
    for field in fields(rules):
        axes = rules.axes(field.name)
        used.update(axes)
        parts = rules.parts(field.name, mesh)
        for letter in CUT_BY.get(field.name, ()):
            if config.dims[letter] % parts:
                raise ConfigError(
                    f"{field.name}: {config.dims[letter]} ({letter}) cannot be divided over "
                    f"{' × '.join(axes)} = {parts} devices; all that is cut there can be over "
                    f"{_divisors(rules, config, axes)}"
                )
    for other in ("batch", "vocab", "embed", "heads", "kda_heads", "mlp"):
        if both := set(rules.axes("sequence")) & set(rules.axes(other)):
            raise ConfigError(
                f"sequence and {other} are both cut along {both.pop()}: tokens need a mesh axis of "
                f"their own, or that of the experts"
            )
    for leaf in leaves(config).values():
        cuts = [(name, logical) for logical in leaf.axes for name in rules.axes(logical)]
        for name, logical in cuts:
            if others := [other for twin, other in cuts if twin == name and other != logical]:
                raise ConfigError(
                    f"{logical} and {others[0]} are both cut along {name}, and are axes of one "
                    f"weight ({leaf.path}): a mesh axis cuts one dimension of it"
                )
    if idle := [axis for axis, size in mesh.items() if size > 1 and axis not in used]:
        raise ConfigError(
            f"mesh axis {idle[0]}: no rule cuts anything along it; the rules name "
            f"{', '.join(sorted(used)) or 'none'}"
        )


_MOST_DEVICES = 1024  # that a message proposes


def _divisors(rules: ShardingRules, config: ModelConfig, axes: Axes) -> str:
    """Over how many devices all can be divided that is cut along these axes and no other."""
    cut = (field.name for field in fields(rules) if rules.axes(field.name) == axes)
    largest = math.gcd(*(config.dims[letter] for name in cut for letter in CUT_BY.get(name, ())))
    return ", ".join(str(n) for n in range(1, min(largest, _MOST_DEVICES) + 1) if largest % n == 0)


def array_pieces(
    rules: ShardingRules, leaf: Leaf, shape: tuple[int, ...], mesh: MeshShape
) -> Pieces:
    """How an array of a leaf is cut: the leaf itself, or the codes or scales that it is stored as.

    A scale belongs to some rows and columns of the leaf and goes where they go; one that belongs to
    all of a dimension is whole along it. Raises ConfigError where a cut would go through the block
    of a scale.
    """
    pieces: list[Axes] = []
    for size, whole, axes in zip(shape, leaf.shape, rules.pieces(leaf.axes, mesh), strict=False):
        parts = parts_of(axes, mesh)
        if size == 1 or parts == 1:
            pieces.append(())
        elif size % parts or whole % parts or (whole // parts) % -(-whole // size):
            raise ConfigError(
                f"{leaf.path}: {whole} in blocks of {-(-whole // size)} cannot be divided over "
                f"{' × '.join(axes)} = {parts} devices; a cut must leave the block of a scale whole"
            )
        else:
            pieces.append(axes)
    return tuple(pieces)


def part_of(shape: tuple[int, ...], pieces: Pieces, mesh: MeshShape) -> tuple[int, ...]:
    """The shape of the part of an array that one device has."""
    return tuple(size // parts_of(axes, mesh) for size, axes in zip(shape, pieces, strict=True))


def named_sharding(pieces: Pieces, mesh: Mesh) -> NamedSharding:
    """The same as JAX says it."""
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in pieces)))


def read_sharded(reader: LeafReader, mesh: Mesh, rules: ShardingRules) -> dict[str, jax.Array]:
    """Every array of a model by path, cut by the rules over the devices of a mesh.

    Each process reads the parts of its own devices and no more; what several of them hold, once.
    Raises ConfigError for rules that do not fit, before anything is read.
    """
    sizes = dict(mesh.shape)
    check_rules(rules, reader.config, sizes)
    shardings = {
        (path, name): named_sharding(array_pieces(rules, leaf, array.shape, sizes), mesh)
        for path, leaf in reader.leaves.items()
        for name, array in reader.arrays(path).items()
    }
    return {
        name: _read_array(reader, path, name, sharding)
        for (path, name), sharding in shardings.items()
    }


def _read_array(reader: LeafReader, path: str, name: str, sharding: NamedSharding) -> jax.Array:
    """An array of a leaf, with the parts of this process read.

    Parts that together are a box are read as one, of a stack some rows at a time, which go to their
    devices before the next are read: the host never holds a stack.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    shape, dtype = reader.arrays(path)[name]
    devices: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        box = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        devices.setdefault(box, []).append(device)
    parts: dict[jax.Device, list[jax.Array]] = {}
    for piece in _pieces(list(devices), dtype.itemsize):
        read = reader.read_box(path, name, piece)
        for box, those in devices.items():
            if (within := _within(box, piece)) is not None:
                part = np.ascontiguousarray(read[within])
                for device in those:
                    parts.setdefault(device, []).append(jax.device_put(part, device))
    whole = [some[0] if len(some) == 1 else jnp.concatenate(some) for some in parts.values()]
    return jax.make_array_from_single_device_arrays(shape, sharding, whole)


def _pieces(boxes: list[Box], itemsize: int) -> Iterator[Box]:
    """What is read at once, of boxes that have nothing in common, in the order of the rows."""
    from .checkpoint import restore

    hull = tuple(
        (min(first for first, _ in ends), max(end for _, end in ends))
        for ends in zip(*boxes, strict=True)
    )
    together = sum(map(_count, boxes)) == _count(hull)
    for box in [hull] if together else boxes:
        if len(box) < 3:
            yield box
            continue
        (first, end), *rest = box
        step = max(1, restore.PIECE_BYTES // (_count(tuple(rest)) * itemsize))
        for row in range(first, end, step):
            yield ((row, min(row + step, end)), *rest)


def _count(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def _within(box: Box, piece: Box) -> tuple[slice, ...] | None:
    """Where in a piece the part of a box lies that is in it."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece, strict=True)]
    if any(first >= end for first, end in common):
        return None
    return tuple(
        slice(first - begin, end - begin)
        for (first, end), (begin, _) in zip(common, piece, strict=True)
    )
