"""Where a model lies: the mesh, the rules that cut it, and what follows for one of its arrays.

Most of it is left to XLA, which carries a cut from the weights and the batch on to what is computed
of them. What it would get wrong is said here: arrays are held to a cut (`place`), and functions
that XLA would take apart, or cannot, run on each device's own part (`over`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm5_jax.sharding import Axes, ShardingRules

LogicalAxes: TypeAlias = Sequence[str | None]
"""What each dimension of an array means, as in the spec table, or None; `batch` is one too."""


@dataclass(frozen=True)
class Placement:
    """A mesh and the rules by which a model, its caches and its activations are cut over it."""

    mesh: Mesh
    rules: ShardingRules

    def cuts(self, logical: str) -> Axes:
        """The axes of the mesh that cut a logical axis."""
        return self.rules.cuts(logical, self.mesh.shape)

    def parts(self, logical: str) -> int:
        """Into how many parts a logical axis is cut."""
        return self.rules.parts(logical, self.mesh.shape)

    def cut(self, size: int, logical: str | None) -> Axes:
        """The axes that cut a dimension of an activation or a cache: see `ShardingRules.cut`."""
        return self.rules.cut(size, logical, self.mesh.shape)

    def spec(self, shape: Sequence[int], axes: LogicalAxes) -> PartitionSpec:
        """How an activation or a cache of this shape is cut; whole dimensions at its end unsaid.

        That, and to leave whole what is empty, is how compiled functions say it: for another form
        what takes their results would be compiled once more.
        """
        if 0 in shape:
            return PartitionSpec()
        cuts = [self.cut(size, axis) for size, axis in zip(shape, axes, strict=True)]
        while cuts and not cuts[-1]:
            cuts.pop()
        return PartitionSpec(*(cut or None for cut in cuts))

    def place(self, x: Any, *axes: str | None) -> Any:
        """`x`, cut by its logical axes: under `jax.jit` XLA is held to it, outside `x` moves.

        A NumPy array must be the same in every process. A shape gets its sharding.
        """
        sharding = NamedSharding(self.mesh, self.spec(x.shape, axes))
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(sharding=sharding)
        if isinstance(x, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(x, sharding)
        return jax.device_put(x, sharding)

    def over(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`function` of each device's own parts: a call of it holds no collective of XLA's own."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def gather_tokens(placement: Placement | None, x: Any) -> Any:
    """`x` [B, T, …], computed of each device's own tokens and then brought to all of them."""
    if placement is None or not placement.cut(x.shape[1], "sequence"):
        return x
    others = [None] * (x.ndim - 2)
    # Held to its cut first: XLA might gather what it is computed of, which is wider.
    x = placement.place(x, "batch", "sequence", *others)
    return placement.place(x, "batch", None, *others)


def place(placement: Placement | None, x: Any, *axes: str | None) -> Any:
    """`placement.place(x, …)`; on one device `x` as it is."""
    return x if placement is None else placement.place(x, *axes)
