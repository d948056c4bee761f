"""Experts that lie on several devices: tokens go to all that hold experts, and a sum comes back.

Left to itself, XLA moves the weights of the chosen experts to every device. Here each device runs
the experts, or the parts of their width, that it holds, for every token of the devices it shares
them with, weighs what they say, and the sums are added up over the devices: of activations alone,
one all-reduce a layer. Where the rows of a batch, or the tokens of a row, are cut over the very
devices that hold different experts, they are gathered first, and each device gets the sum of its
own back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from glm5_jax.nn.placement import Placement
from glm5_jax.sharding import Axes, as_axes

if TYPE_CHECKING:
    from glm5_jax.nn.ffn import Experts


@dataclass(frozen=True)
class Spread:
    """Where a layer's experts lie: `specs` of its arrays, in the order of its tree.

    Along what cuts neither experts nor their width (FSDP) arrays are gathered for the time of it.
    """

    placement: Placement
    specs: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, experts: Experts, placement: Placement) -> Spread | None:
        """That of experts whose arrays are sharded; None where the rules cut none of them.

        Nor the tokens of a row, which are sorted by expert: XLA would gather them.
        """
        if all(placement.parts(axis) == 1 for axis in ("experts", "expert_mlp", "sequence")):
            return None
        held = placement.cuts("experts") + placement.cuts("expert_mlp")

        def own(cut: str | Axes | None) -> Axes | None:
            return tuple(axis for axis in as_axes(cut) if axis in held) or None

        specs = (array.sharding.spec for array in jax.tree.leaves(experts))
        return cls(placement, tuple(PartitionSpec(*map(own, spec)) for spec in specs))

    def run(
        self,
        experts: Experts,
        x: Float[Array, "B T X"],
        chosen: Int[Array, "B T k"],
        weights: Float[Array, "B T k"],
    ) -> Float[Array, "B T X"]:
        """The weighted sum of each token's experts; over devices in float32, cast once."""
        by_expert, by_width = (self.placement.cuts(axis) for axis in ("experts", "expert_mlp"))
        cut = ("batch", "sequence")
        rows = self.placement.spec(x.shape[:2], cut)
        cuts = by_expert + by_width
        shared = [
            tuple(axis for axis in self.placement.cut(size, along) if axis in cuts)
            for size, along in zip(x.shape, cut, strict=False)
        ]
        held = experts.num_experts // self.placement.parts("experts")

        def own(experts: Experts, x: Array, chosen: Array, weights: Array) -> Array:
            dtype = x.dtype
            for axis, names in enumerate(shared):
                if names:
                    x, chosen, weights = jax.lax.all_gather(
                        (x, chosen, weights), names, axis=axis, tiled=True
                    )
            first = held * jax.lax.axis_index(by_expert) if by_expert else 0
            here = (chosen >= first) & (chosen < first + held)
            y = experts.own_sum(x, jnp.where(here, chosen - first, held), weights)
            for axis, names in enumerate(shared):
                if names:
                    y = jax.lax.psum_scatter(y, names, scatter_dimension=axis, tiled=True)
            others = tuple(axis for axis in cuts if axis not in sum(shared, ()))
            return (jax.lax.psum(y, others) if others else y).astype(dtype)

        specs = jax.tree.unflatten(jax.tree.structure(experts), self.specs)
        run = self.placement.over(own, (specs, rows, rows, rows), rows)
        return run(experts, x, chosen, weights)
